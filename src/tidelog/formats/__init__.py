"""Pure bytes: one module is the only one to know one layout. Nothing here opens a file or asks the time."""
