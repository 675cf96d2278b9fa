"""The guided tour of `make demo`: the log library (`logs`), topics (`topics`), a whole shop on Spark (`shop`)."""
