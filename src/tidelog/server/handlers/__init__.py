"""The handlers: requests → answers. They know nothing of sockets."""
