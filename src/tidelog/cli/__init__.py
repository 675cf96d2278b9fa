"""The command line: `tidelog topic …`, `tidelog check`, `tidelog log …`, and the guided tour of `make demo`."""
