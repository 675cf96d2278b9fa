"""The `/v0` contract over real sockets against a real server process, with clients that share no code with it."""
