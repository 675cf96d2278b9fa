"""`tidelog schema`: the fields of a topic's JSON by seq, for typed exports."""

from __future__ import annotations

from argparse import Namespace

from tidelog.cli.command import DATABASE, Commands, add_command, add_group, parse_count
from tidelog.cli.render import Screen, plural
from tidelog.cli.target import target_place

_DESCRIPTION = """\
A registered schema says which fields the JSON of a topic has from a seq on. An export with --registered-schema makes
them columns: each range gets the schema of its records, and new fields are added to the table. Schemas are records of
the topic tidelog.schemas.

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_FIRST_STEPS = """\
start here:
  $ tidelog schema set data orders 'sku string, price double'
  $ tidelog schema history data orders
  $ tidelog pipeline export data orders table --registered-schema
"""


def add(commands: Commands) -> None:
    """Add the `schema` group to the command line."""
    short = "schemas of topics by seq, for typed exports"
    verbs = add_group(commands, "schema", summary=short, description=_DESCRIPTION, first_steps=_FIRST_STEPS)
    parser = add_command(
        verbs,
        "set",
        set_schema,
        DATABASE,
        "TOPIC",
        "SCHEMA",
        summary="register the fields of a topic from a seq on",
        description="Register the fields of TOPIC's JSON, as 'name type, …', from the next record on, or from\n"
        "--from-seq on. A later schema has all fields of the one before it and may add some; one that lacks a field,\n"
        "or gives it another type, is refused. Of a directory this process must be the only writer.",
        examples="tidelog schema set data orders 'sku string, price double'\n"
        "tidelog schema set http://127.0.0.1:4000 orders 'sku string, price double, vat decimal(5,2)'",
    )
    parser.add_argument("--from-seq", type=parse_count, metavar="SEQ", help="the first record that has it (the next)")
    for name, run, summary, description in (
        ("show", show, "the schema of the newest record", "Show the fields that the newest record of TOPIC has."),
        ("history", history, "all schemas of a topic", "Show which schema applied from which seq on, oldest first."),
    ):
        add_command(
            verbs,
            name,
            run,
            DATABASE,
            "TOPIC",
            summary=summary,
            description=f"{description} Changes nothing; a writer may be at work.",
            examples=f"tidelog schema {name} data orders\ntidelog schema {name} http://127.0.0.1:4000 orders --json",
        )


def set_schema(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    done = pipelines.set_schema(target_place(args), args.topic, args.schema, first_seq=args.from_seq, key=args.api_key)
    screen.print_result(done._asdict(), f"{done.topic} has this schema from seq {done.first_seq} on: {done.schema}")
    return 0


def show(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    found = pipelines.schema_history(target_place(args), args.topic, key=args.api_key)
    if not found:
        screen.print_result({"topic": args.topic, "schema": None}, f"{args.topic} has no registered schema")
        return 0
    now = found[-1]
    screen.print_result(now._asdict(), f"{args.topic}, from seq {now.first_seq} on: {now.schema}")
    return 0


def history(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    found = pipelines.schema_history(target_place(args), args.topic, key=args.api_key)
    screen.print_result(
        {"topic": args.topic, "schemas": [each._asdict() for each in found]},
        f"{args.topic}: {plural(len(found), 'schema')}",
        titles=(">from seq", "schema"),
        rows=[(f"{each.first_seq:,}", each.schema) for each in found],
    )
    return 0
