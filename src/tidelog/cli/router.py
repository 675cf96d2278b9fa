"""`tidelog router …`: which topics are passed on to which, in a directory or on a server."""

from __future__ import annotations

from argparse import BooleanOptionalAction, Namespace
from typing import Any

from tidelog.cli.command import (
    DATABASE,
    Commands,
    add_command,
    add_group,
)
from tidelog.cli.render import Screen, plural
from tidelog.cli.target import open_target, target_place
from tidelog.engine.routing.router import GUARANTEES, RouterState
from tidelog.errors import RouterNotFound

_DESCRIPTION = """\
A router passes on every record that a topic gets to another one, from when it is made. Copies are
found again from the topic they come from: passing on costs no write. A topic is fed from one other.

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_FIRST_STEPS = """\
start here:
  $ tidelog router add data to-audit orders audit --filter 'order-*'
  $ printf 'first\\n' | tidelog topic write data orders --tag order-7
  $ tidelog router ls data
  $ tidelog topic read data audit
  $ tidelog router drop data to-audit
"""


def add(commands: Commands) -> None:
    """Add the `router` group to the command line."""
    short = "routers: which topics are passed on to which"
    verbs = add_group(commands, "router", summary=short, description=_DESCRIPTION, first_steps=_FIRST_STEPS)
    parser = add_command(
        verbs,
        "ls",
        ls,
        DATABASE,
        summary="list routers",
        description="List the routers of a database, and how many records each has passed on. Reads only.",
        examples="tidelog router ls data\ntidelog router ls data --source orders --json",
    )
    parser.add_argument("--prefix", default="", metavar="P", help="only routers whose name begins so")
    parser.add_argument("--source", metavar="TOPIC", help="only those from this topic")
    parser.add_argument("--dest", metavar="TOPIC", help="only those to this topic")
    add_command(
        verbs,
        "show",
        show,
        DATABASE,
        "ROUTER",
        summary="show one router",
        description="Show what a router passes on, and how. Reads only; a writer may be at work.",
        examples="tidelog router show data to-audit",
    )
    _add_add_command(verbs)
    add_command(
        verbs,
        "drop",
        drop,
        DATABASE,
        "ROUTER",
        summary="stop passing on",
        description="Drop a router after it has passed on the current records of its source. Copies stay.",
        examples="tidelog router drop data to-audit",
    )


def _add_add_command(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "add",
        add_router,
        DATABASE,
        "ROUTER",
        "SOURCE",
        "DEST",
        summary="make a router, or change its options",
        description="Have what SOURCE gets from now on passed on to DEST; topics that are not there are made. A "
        "router that\n"
        "is there is changed: options that are not given take their defaults. Its ends never change.",
        examples="tidelog router add data to-audit orders audit\n"
        "tidelog router add data to-audit orders audit --filter 'order-*' --no-tag --exactly-once",
    )
    parser.add_argument(
        "--filter", metavar="TAG", help="only records with this tag; with a * at its end, that begin so"
    )
    parser.add_argument("--tag", action=BooleanOptionalAction, default=True, help="copies keep the tag of their record")
    parser.add_argument(
        "--node", action=BooleanOptionalAction, default=True, help="copies keep the node of their record"
    )
    parser.add_argument("--create", action=BooleanOptionalAction, default=True, help="make DEST where there is none")
    parser.add_argument("--allow-cycle", action="store_true", help="also where DEST leads to SOURCE already")
    parser.add_argument("--exactly-once", action="store_true", help="copies have their origin in their meta")


def router_fields(state: RouterState) -> dict[str, Any]:
    return {name: value for name, value in state._asdict().items() if name != "created"}


def ls(args: Namespace, screen: Screen) -> int:
    """One line a router."""
    with open_target(args, screen, write=False) as log:
        states = log.routers(args.prefix, args.source, args.dest)
    screen.print_result({"path": target_place(args), "routers": [router_fields(state) for state in states]})
    if screen.json:
        return 0
    if states:
        rows = [[it.router, it.source, it.dest, _format_filter(it), f"{it.forwarded_total:,}"] for it in states]
        screen.print_table(("router", "source", "dest", "filter", ">passed on"), rows)
    print(plural(len(states), "router"))
    return 0


def _format_filter(state: RouterState) -> str:
    return "-" if state.filter is None else f"{state.filter[1]} {state.filter[2]}"


def show(args: Namespace, screen: Screen) -> int:
    """Everything about one router."""
    with open_target(args, screen, write=False) as log:
        state = log.find_router(args.router)
    if state is None:
        raise RouterNotFound(args.router)
    return _print_router(state, screen)


def _print_router(state: RouterState, screen: Screen) -> int:
    screen.print_result(router_fields(state))
    if screen.json:
        return 0
    kept = [name for name, kept in (("tag", state.preserve_tag), ("node", state.preserve_node)) if kept]
    print(f"{state.router}: {state.source} to {state.dest}, {plural(state.forwarded_total, 'record')} passed on")
    print(f"  filter       {_format_filter(state)}")
    print(f"  copies keep  {' and '.join(['data', 'meta', *kept])}")
    print(f"  guarantee    {state.guarantee}{', around a circle' if state.allow_cycle else ''}")
    return 0


def add_router(args: Namespace, screen: Screen) -> int:
    with open_target(args, screen, write=True, create=True) as log:
        state = log.router(
            args.router,
            args.source,
            args.dest,
            preserve_node=args.node,
            preserve_tag=args.tag,
            create_dest=args.create,
            filter=args.filter,
            allow_cycle=args.allow_cycle,
            guarantee=GUARANTEES[1] if args.exactly_once else GUARANTEES[0],
        )
    return _print_router(state, screen)


def drop(args: Namespace, screen: Screen) -> int:
    with open_target(args, screen, write=True) as log:
        if not log.drop_router(args.router):
            raise RouterNotFound(args.router)
    screen.print_result({"router": args.router, "dropped": True})
    if not screen.json:
        print(f"dropped {args.router}; its copies stay")
    return 0
