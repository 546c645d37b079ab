"""Kill the model runner with -9 in the middle of four stories; every story continues where it was.

The model runs in a process of its own (runner="process"). Its supervisor notices the death and starts another process,
which computes the four stories so far again, from the journal, and continues. The same four are generated once more
without a crash, to compare.

python examples/crash.py [--model PATH_OR_HUB_ID]
"""

import argparse
import logging
import os
import signal

import attrs
import trio

import triolet

PROMPTS = [f"Tell me a story about a {hero}." for hero in ("dog", "fox", "boat", "king")]
KILL_AFTER_TOKENS = 8  # of every story


async def tell_all(engine: triolet.Engine, *, kill: bool) -> list[str]:
    stories, num_tokens = [""] * len(PROMPTS), [0] * len(PROMPTS)

    async def tell(index: int) -> None:
        nonlocal kill
        params = attrs.evolve(engine.default_sampling_params(), max_tokens=120, seed=index)
        async with engine.generate([{"role": "user", "content": PROMPTS[index]}], params) as stream:
            async for output in stream:
                stories[index], num_tokens[index] = output.text, len(output.outputs[0].token_ids)
                if kill and min(num_tokens) >= KILL_AFTER_TOKENS:
                    kill = False
                    print(f"the four stories have {', '.join(map(str, num_tokens))} tokens")
                    kill_runner(engine)

    async with trio.open_nursery() as nursery:
        for index in range(len(PROMPTS)):
            nursery.start_soon(tell, index)
    return stories


def kill_runner(engine: triolet.Engine) -> None:
    process_id = engine.model_info.process_id
    assert process_id is not None
    print(f"kill -9 {process_id}: the model runner is gone, and all that it had computed")
    os.kill(process_id, signal.SIGKILL)


async def main(model: str | None) -> None:
    async with triolet.open_engine(model=model, runner="process") as engine:
        stories = await tell_all(engine, kill=True)
        print(
            f"restarts: {engine.statistics().num_restarts}; the runner is now process {engine.model_info.process_id}\n"
        )
        for prompt, story in zip(PROMPTS, stories, strict=True):
            print(f"> {prompt}\n{story}\n")
        same = await tell_all(engine, kill=False) == stories
        print(f"told again in peace, word for word the same: {'yes' if same else 'no'}")


def in_one_line(record: logging.LogRecord) -> bool:
    """Log a crash in one line instead of a traceback."""
    record.exc_info = None
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    logging.getLogger("triolet.supervisor").addFilter(in_one_line)
    trio.run(main, parser.parse_args().model)
