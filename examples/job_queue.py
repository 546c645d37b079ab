"""Answer the jobs of a queue with one engine per worker process, here with huey.

python examples/job_queue.py [--model PATH_OR_HUB_ID]

Needs `pip install huey`. The jobs are in a SQLite file, so that workers can be other processes; this one starts a
worker with four threads in itself, waits for its answers, and ends. Other queues are alike: open the engine where a
worker process starts, and close it where it ends (`worker_process_init` of Celery, `on_startup` of arq).
"""

import argparse
import contextlib
import tempfile
from pathlib import Path

from huey import SqliteHuey
from huey.consumer import Consumer

import triolet
import triolet.blocking

QUESTIONS = ("Hello!", "Count from 1 to 5.", "What is the opposite of hot?", "Name the days of the week.")


class Worker:
    """Engine of one worker process, and the tasks that it answers."""

    def __init__(self, file: Path, model: str | None) -> None:
        self.queue = SqliteHuey(filename=str(file))
        self.model = model
        self.scope = contextlib.ExitStack()
        self.engine: triolet.blocking.BlockingEngine | None = None
        # A job that fails is tried again; `Overloaded` says after how many seconds that is sensible.
        self.answer = self.queue.task(retries=2, retry_delay=1)(self._answer)

    def open(self) -> None:
        """Open the engine, once for the process: all threads share it, and their jobs are computed together."""
        self.engine = self.scope.enter_context(triolet.blocking.open_engine(model=self.model))

    def _answer(self, question: str) -> str:
        assert self.engine is not None, "the worker has opened it"
        params = triolet.SamplingParams(max_tokens=40, temperature=0)
        return self.engine.complete([{"role": "user", "content": question}], params).text


def main(model: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(Path(folder, "jobs.sqlite"), model)
        jobs = [worker.answer(question) for question in QUESTIONS]  # anywhere that has the file
        consumer = Consumer(worker.queue, workers=4, worker_type="thread", initial_delay=0.01)
        with worker.scope:
            worker.open()
            consumer.start()
            for question, job in zip(QUESTIONS, jobs, strict=True):
                print(f"{question} {job(blocking=True, timeout=60)}")
            consumer.stop(graceful=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    main(parser.parse_args().model)
