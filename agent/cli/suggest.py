"""`record` and `suggest`: what is seen now, in a file; and what policy would allow it."""

from __future__ import annotations

import re
from pathlib import Path

import click

from agent.cli.environment import Refusal, Sentence, Session, with_examples
from agent.cli.monitor import asked_endpoints, endpoint_option

_SIZE = re.compile(r"([0-9]+)([KMG]?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_path = click.Path(path_type=Path)


@click.command(
    short_help="Write what is asked and connected to into a file.",
    epilog=with_examples("sudo namegate record week.rec", "sudo namegate record --for 10m --size 50M build.rec"),
)
@click.argument("file", type=_path)
@click.option("--for", "duration", metavar="DURATION", help="End after this long; else with Ctrl-C.")
@click.option("--size", default="1G", show_default=True, metavar="SIZE", help="End when the file is as large as this.")
@click.pass_obj
def record(session: Session, file: Path, duration: str | None, size: str) -> None:
    """Write questions, allowed flows and denied packets into a new file, for `suggest` and `check --against`.

    It goes on when the agent starts anew, and the file says how long there was none.
    """
    session.require_root("record", "it asks the agent through a socket for root")
    from agent.config import seconds_of
    from agent.suggest.record import Recorder

    seconds = None if duration is None else seconds_of(duration)
    if duration is not None and seconds is None:
        raise Sentence(f"--for: `{duration}` is not a duration: write 30s, 10m or 1h")
    parts = _SIZE.fullmatch(size)
    if parts is None or not int(parts[1]):
        raise Sentence(f"--size: `{size}` is not a size: write 500K, 50M or 1G")
    octets_max = int(parts[1]) * _UNITS[parts[2].upper()]
    recorder = Recorder(file, session.listen, lambda: asked_endpoints(session), for_s=seconds, octets_max=octets_max)
    try:
        recorder.run(lambda: click.echo(f"recording into {file}", err=True))
    except KeyboardInterrupt:
        pass  # the usual way to end it
    except FileExistsError:
        raise Sentence(f"{file} is there already: name another file, or remove it") from None
    except OSError as error:
        raise Sentence(f"{file} cannot be written: {error.strerror or error}") from None
    counts = recorder.counts
    said = f"{counts['question']:,} questions, {counts['verdict']:,} flows, {counts['drop']:,} drops in {file}"
    if recorder.lost:
        said += f"; {recorder.lost:,} events are not there: they came faster than they could be told"
    if recorder.gaps:
        said += f"; gaps without an agent: {recorder.gaps}"
    click.echo(said, err=True)


@click.command(
    short_help="Make a policy from what was recorded.",
    epilog=with_examples(
        "namegate suggest week.rec > policies/build.txt",
        "namegate suggest -o cnp --patterns monday.rec tuesday.rec",
        "namegate suggest --endpoint app=build --only-allowed week.rec",
    ),
)
@click.argument("records", nargs=-1, required=True, type=_path, metavar="RECORD...")
@click.option(
    "-o", "--output", type=click.Choice(("list", "cnp")), default="list", show_default=True,
    help="One list for every endpoint, or a CiliumNetworkPolicy for each set of labels.",
)  # fmt: skip
@endpoint_option
@click.option("--patterns", is_flag=True, help="Write *.parent for three and more names under one parent.")
@click.option("--only-allowed", is_flag=True, help="Leave out what was only denied, or let pass by audit.")
def suggest(records: tuple[Path, ...], output: str, endpoint: str | None, *, patterns: bool, only_allowed: bool) -> None:
    """Make a policy that allows what was recorded, with comments: who used each entry, how often. Needs no root.

    Names are exact unless --patterns is given; an address stands for itself only where no name was seen for it. What was denied
    or audited is included and says so: read it before you apply it.
    """
    from agent.suggest.propose import as_list, as_policies, heading_of, propose
    from agent.suggest.record import RecordError
    from agent.suggest.traffic import read_traffic

    try:
        traffic = read_traffic(records, endpoint)
    except RecordError as error:
        raise Sentence(str(error)) from None
    proposals = [propose(party, only_allowed=only_allowed, patterns=patterns) for party in traffic.parties]
    without = [f"{each.party}: {sentence}" for each in proposals if not each.entries for sentence in each.besides]
    proposals = [proposal for proposal in proposals if proposal.entries]
    if not proposals:
        raise Refusal("\n".join(["nothing was recorded that a policy could allow", *without]))
    heading = [*heading_of(traffic, [record.name for record in records]), *without]
    if output == "cnp":
        click.echo(as_policies(proposals, heading), nl=False)
        return
    parties = [f"{proposal.party} ({', '.join(proposal.party.interfaces)})" for proposal in proposals]
    click.echo(as_list(proposals, [*heading, f"Used by {'; '.join(parties)}."]), nl=False)
    if len(proposals) > 1:
        click.echo(f"{len(proposals)} sets of labels share this list; -o cnp keeps them apart, --endpoint takes one", err=True)
