"""The `tidelog` command line, one module per group of commands.

Read `main` first: it builds the command line, runs one command and turns errors into exit codes. `command` declares
commands and parses their values, also the DATABASE of a command; `target` opens it, a directory or a server, and
`render` prints results. `topic`, `queue` (with `worker`), `group` (with `gaps`), `router`, `channel`, `retention`,
`erase`, `tier` and `backup` are written against `protocols.Database`; so are `top`, `bench`, `query` and `export`.
`serve`, `init`, `doctor` (with `check`) and `pipeline` work on the whole of a database, `log` on a segmented log.
`completion` writes scripts for shells, `plot` draws bars and SVG files.
"""
