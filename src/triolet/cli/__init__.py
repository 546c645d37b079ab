"""The `triolet` command: its subcommands and their flags.

Flags are checked here and become an `EngineConfig` and sampling parameters. Each subcommand runs in the module of its
name, which is imported when it starts, so that `triolet --help` stays quick.

Exit codes: 0 success, 1 error, 2 usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triolet import __version__
from triolet.cli import failures, options
from triolet.cli.doctor.commands import doctor
from triolet.cli.models.commands import MODEL_COMMANDS
from triolet.cli.profile.commands import profile
from triolet.cli.profile.workload import workload_options
from triolet.cli.replay.commands import replay
from triolet.cli.shell.commands import SHELL_COMMANDS
from triolet.cli.terminal import at_a_terminal
from triolet.cli.worker.commands import worker
from triolet.client.address import ServerAddress
from triolet.config.engine import EngineConfig
from triolet.config.server import GatewayConfig

if TYPE_CHECKING:
    from triolet.server.models.host import FurtherModel


# Commands of ollama, llama.cpp and vLLM, and what they are here.
ELSEWHERE: Final = {
    "run": "triolet chat MODEL is a conversation, and triolet chat MODEL -q TEXT one answer",
    "create": "a preset is a model with settings of your own; triolet config says where they are",
    "ls": "triolet list shows the models of this machine",
    "models": "triolet list shows the models of this machine",
    "delete": "triolet rm deletes a model",
    "remove": "triolet rm deletes a model",
    "download": "triolet pull fetches a model",
    "server": "triolet serve is the server",
    "complete": "triolet generate continues a prompt",
    "collect-env": "triolet doctor looks at this machine",
}


class CommandGroup(click.Group):
    """Group of commands that report every exception in one line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # `bench` has a MODEL, so it cannot be a group: "bench serve" is a name of two words.
        if len(args) > 1 and " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if (hint := ELSEWHERE.get(args[0])) is None:
                raise
            raise click.UsageError(f"No such command {args[0]!r}: {hint}", error.ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        # click reports these itself.
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BaseException as error:
            raise failures.ending(error) from error


@click.group(
    cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Run a language model: chat with it, serve it, measure it.

    MODEL, or --model, is a folder, a GGUF file or a Hugging Face hub id; without one, every command uses triolet-nano,
    a small model that ships with the program.
    """


@main.command(cls=options.SectionedCommand)
@click.option(
    "-p",
    "--prompt",
    required=True,
    metavar="TEXT",
    help="What to continue; - reads it from stdin (less a final newline).",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object at the end instead of the text as it comes.",
)
@options.sampling_options
@options.engine_options
def generate(prompt: str, as_json: bool, sampling: Mapping[str, Any], config: EngineConfig) -> None:
    """Continue a prompt.

    The prompt goes to the model as it is, without a chat template, and the answer goes to stdout as it comes.
    """
    text = options.text_or_stdin(prompt, "--prompt")
    # Late, as in every command: `--help` and wrong flags need no engine.
    from triolet.cli.generate import run

    run(text, sampling, config, as_json=as_json)


@main.command(cls=options.SectionedCommand)
@click.option(
    "-q",
    "--question",
    "questions",
    metavar="TEXT",
    multiple=True,
    help="Answer this and leave; - reads stdin. Given several times, the texts are one question. Only the reply is "
    "printed.",
)
@click.option("--system", metavar="TEXT", help="The system prompt; @FILE reads it from a file.")
@click.option(
    "--stats/--no-stats",
    default=None,
    help="After each reply, one line of timings. By default only in a conversation; with -q it goes to stderr.",
)
@click.option(
    "--format",
    "form",
    metavar="json|@FILE",
    help="Form of the answers: a JSON object, or JSON that follows the schema in FILE.",
)
@click.option(
    "--json-events",
    is_flag=True,
    help="With --url: print the events of the server, one JSON object per line, instead of the replies.",
)
@options.server_address_options
@options.sampling_options
@options.engine_options
def chat(
    questions: tuple[str, ...],
    system: str | None,
    stats: bool | None,
    form: str | None,
    json_events: bool,
    address: ServerAddress | None,
    sampling: Mapping[str, Any],
    config: EngineConfig,
) -> None:
    """Talk with a model.

    The model runs in this process, or with --url in a server, where MODEL names one of its models. At a terminal this
    is a conversation: Ctrl-C stops a reply, Ctrl-D leaves, /help shows more. With -q, or with something other than a
    terminal on stdin, one question is answered.
    """
    system = options.text_or_file(system, "--system")
    if json_events and address is None:
        raise click.UsageError("--json-events prints the events of a server; --url names one")
    if not questions and not at_a_terminal():
        questions = ("-",)
    question = options.joined_texts(questions, "--question") if questions else None
    if question == "":
        raise click.UsageError("the question must not be empty")
    from triolet.cli.chat import ChatOptions, answer, converse, local, remote

    # Strict readers of the events know OpenAI's only.
    model = options.named_model()
    opener = (
        local(config, options.other_models())
        if address is None
        else remote(address, model, vendor_events=not json_events)
    )
    # Without a flag a conversation shows timings, and a single answer does not.
    shows_stats = stats is not False if question is None else stats is True
    chosen = ChatOptions(
        system=system,
        sampling=sampling,
        form=options.form_of(form, "--format"),
        stats=shows_stats,
        json_events=json_events,
    )
    if question is None:
        converse(opener, chosen)
    else:
        answer(question, opener, chosen)


@main.command(cls=options.SectionedCommand)
@options.server_options
def serve(gateway: GatewayConfig, config: EngineConfig, models: Mapping[str, FurtherModel]) -> None:
    """Serve a model over WebSocket and HTTP, with a page to chat on.

    The WebSocket speaks OpenAI's Responses protocol; OpenAI's HTTP routes are on the same port. When the server is
    ready, it prints one line with its address. SIGTERM or Ctrl-C lets active responses finish within --grace-period; a
    second one ends at once.
    """
    from triolet.cli.serve import run

    run(gateway, config, models)


@main.command(cls=options.SectionedCommand)
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "--api-key",
    envvar="TRIOLET_API_KEY",
    help="Key with which the router itself asks the engines; clients bring their own. TRIOLET_API_KEY is read as well.",
)
@options.router_options
def route(urls: tuple[str, ...], api_key: str | None, gateway: GatewayConfig) -> None:
    """Serve the clients of several engines on one port.

    URL is that of a `triolet serve`, such as http://10.0.0.1:8000; all engines must serve the same models. A stream
    whose engine dies or shuts down goes on at another one, with the same tokens. SIGTERM or Ctrl-C lets answers end
    within --grace-period; a second one ends at once.
    """
    from triolet.router.run import run

    run(options.engine_addresses(urls, api_key), gateway)


@main.command(cls=options.SectionedCommand)
@workload_options(num_prompts=32, output_len=128)
@options.engine_options
def bench(
    num_prompts: int,
    input_len: int,
    output_len: int,
    concurrency: int | None,
    as_json: bool,
    config: EngineConfig,
) -> None:
    """Measure how fast a model answers on this machine.

    Prompts of random tokens, greedy answers of a fixed length; a short round before warms everything up.
    """
    from triolet.cli.bench import Work, run

    together = min(concurrency or config.max_num_seqs, num_prompts)
    work = Work(num_prompts=num_prompts, input_len=input_len, output_len=output_len, concurrency=together)
    run(work, config, as_json=as_json)


@main.command("run-batch", cls=options.SectionedCommand)
@click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", metavar="OUT.jsonl", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--concurrency", type=click.IntRange(1), help="Requests under way together; by default --max-num-seqs."
)
@options.engine_options
def run_batch(source: Path, target: Path, concurrency: int | None, config: EngineConfig) -> None:
    """Answer a file of requests, in OpenAI's batch format.

    Every line of IN.jsonl has custom_id, method, url and body, and every line of OUT.jsonl the answer to one, in the
    order in which they end. The same command continues a run that was interrupted: what OUT.jsonl has is not asked
    again.
    """
    if target.exists() and target.samefile(source):
        raise click.UsageError(f"OUT.jsonl must be another file than IN.jsonl; got {target} for both")
    from triolet.cli.batch.run import run

    run(source, target, config, concurrency or config.max_num_seqs)


@main.command("bench serve", cls=options.SectionedCommand)
@click.option(
    "--url",
    "urls",
    multiple=True,
    required=True,
    envvar="TRIOLET_URL",
    metavar="URL",
    help="Server to measure; ws:// asks over the WebSocket of the Responses protocol, http:// over --route. May be "
    "given several times.",
)
@click.option("--api-key", envvar="TRIOLET_API_KEY", metavar="KEY", help="API key of the servers.")
@click.option("--model", metavar="NAME", help="Name of a model; by default the first that each server lists.")
@click.option(
    "--route",
    type=click.Choice(["chat", "completions", "responses"]),
    default="chat",
    show_default=True,
    help="Route over HTTP.",
)
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    default=(float("inf"),),
    metavar="X",
    help="Requests a second, at random moments; inf, the default, sends all at once. May be given several times.",
)
@click.option(
    "--num-prompts", type=click.IntRange(1), default=32, show_default=True, help="Requests in a round."
)
@click.option(
    "--input-len", type=click.IntRange(1), default=128, show_default=True, help="Words in a prompt."
)
@click.option(
    "--output-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens in an answer."
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for answers of exactly --output-len tokens; not every server knows the field.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of prompts and moments.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per round and line.")
def bench_serve(
    urls: tuple[str, ...],
    api_key: str | None,
    model: str | None,
    route: str,
    rates: tuple[float, ...],
    num_prompts: int,
    input_len: int,
    output_len: int,
    ignore_eos: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Measure what clients of a server wait for.

    Requests are sent when they are due, however many are unanswered, each on a connection of its own. Any server with
    OpenAI's routes can be measured; every --rate is a round against every --url.
    """
    for url in urls:
        options.server_address(url, api_key)
    if any(rate != rate for rate in rates):
        raise click.UsageError("--rate must be a number above 0; got nan")
    from triolet.cli.load_test.measure import Load
    from triolet.cli.load_test.run import ServeBenchmark, run
    from triolet.cli.load_test.targets import Route

    benchmark = ServeBenchmark(
        urls=urls,
        route=Route(route),
        rates=rates,
        load=Load(num_prompts=num_prompts, input_len=input_len, rate=rates[0], seed=seed),
        output_len=output_len,
        ignores_eos=ignore_eos,
        model=model,
        api_key=api_key,
    )
    run(benchmark, as_json=as_json)


for one in (*MODEL_COMMANDS, *SHELL_COMMANDS, doctor, profile, replay, worker):
    main.add_command(one)
