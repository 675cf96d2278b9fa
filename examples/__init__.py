"""Runnable examples. `examples/demo` is the guided tour of `make demo`."""
