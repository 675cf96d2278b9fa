"""The command line: `tidelog log …`, and the guided tour of `make demo`."""
