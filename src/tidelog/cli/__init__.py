"""The `tidelog` command line, one module per group of commands.

Read `main` first: it builds the command line, runs one command and turns errors into exit codes. `command` declares
commands and parses their values, `render` prints results, `target` opens the directory or the server that a command
names. `topic`, `queue` (with `worker`), `group` (with `gaps`), `router` and `channel` work on a directory of topics,
`serve`, `doctor` (with `check`), `tier` and `pipeline` on the whole of it, `log` on a segmented log.
"""
