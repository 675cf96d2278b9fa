"""The shapes of the `/v0` contract, as both sides of it see them."""
