"""Methods of `Engine` that exchange the weights of the model while it serves.

New weights are checked whole before anything is changed. Then the requests are held, the runner gives up the model and
loads the other one, and a new scheduler computes what was held again, as after a crash. If the load fails, the runner
loads the old weights again, and the streams notice a pause. A crash restart loads the weights that are in use.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio

from triolet.actors.executors.threads import clean_up_in_thread, run_in_thread
from triolet.config.engine import EngineConfig
from triolet.core.request.param_validation import check_type
from triolet.core.sleep import WEIGHTS, check_mode
from triolet.engine.pause import PauseMethods
from triolet.errors import InvalidRequest, shown


class WeightMethods(PauseMethods):
    """Base class of `Engine`: exchanges the weights."""

    config: EngineConfig

    def __init__(self) -> None:
        self._weights_lock = trio.Lock()  # one exchange at a time
        self._updates: Path | None = None  # folder of the folders that `update_weights` makes
        self._update_numbers = itertools.count(1)

    @property
    def weight_version(self) -> int:
        """Number of exchanges of the weights so far: the version of those in use."""
        return self._core.weights.version

    @property
    def weights_folder(self) -> str:
        """Folder of the weights in use."""
        if self._core.weights.folder is not None:
            return self._core.weights.folder
        assert self._core.model.info is not None, "the runner starts before the engine is handed out"
        return self._core.model.info.folder

    async def reload_weights(self, path: str, *, mode: str = "keep") -> int:
        """Serve with the weights of another folder from now on; return their version.

        An engine that sleeps loads them when it wakes; if that fails, it has the old ones and a line in its log.
        Cancelled before the runner has begun to load them, the call changes nothing.

        Args:
            path: a model folder of the same architecture, with tensors of the same names, shapes and dtypes. It must
                stay there: a restart of the runner reads it again.
            mode: what happens to the live requests: `keep` has them go on with the new weights, `wait` lets them finish
                with the old ones before, `abort` ends them.
        Raises:
            UnsupportedFeature: the engine has several replicas.
            ModelError: the weights do not fit or cannot be loaded; the old ones are in use.
            InvalidRequest: a wrong argument.
            EngineClosed: the engine drains or has ended.
            EngineDead: the engine has died.
        """
        self._run.check()
        self._check_one_replica("reload_weights")
        check_mode(mode)
        check_type("path", path, str, "the path of a folder")
        self._availability.check_open()
        folder = _absolute(path)
        async with self._weights_lock:
            await self._work(partial(check_folder, Path(self.weights_folder), folder))
            return await self._exchange(str(folder), mode)

    async def update_weights(
        self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, mode: str = "keep"
    ) -> int:
        """Serve with other values of some tensors from now on; return the version of the weights.

        They are written to a temporary folder of the engine, from which a restart of the runner reads them again.

        Args:
            tensors: torch tensors by the names that they have in the checkpoint, of the same shapes and dtypes.
            mode: see `reload_weights`, as for errors.
        Raises:
            ModelFileError: the folder cannot be written, as on a full disk.
        """
        self._run.check()
        self._check_one_replica("update_weights")
        check_mode(mode)
        self._availability.check_open()
        try:
            updates = dict(tensors)
        except (TypeError, ValueError):
            raise InvalidRequest(
                f"tensors must be a mapping or pairs of names and tensors; got {shown(tensors)}",
                field="tensors",
                got=tensors,
            ) from None
        if not updates:
            raise InvalidRequest("tensors must hold at least one tensor; got none", field="tensors")
        async with self._weights_lock:
            if self._updates is None:
                await self._work(self._make_updates)
            assert self._updates is not None
            folder = self._updates / str(next(self._update_numbers))
            # What was asked for while the engine slept is not in use yet, and this update comes on top of it.
            former = self._core.weights.requested or self.weights_folder
            try:
                await self._work(partial(write_update, Path(former), folder, updates))
                version = await self._exchange(str(folder), mode)
            finally:
                await self._clean_up(partial(_delete_others, self._updates, self._folders_in_use()))
            return version

    async def _exchange(self, folder: str, mode: str) -> int:
        core = self._core
        limit = self._limit_of(mode)
        # Of a call that returned while the engine slept.
        former, former_limit = core.weights.requested, core.sleep.limit_of(WEIGHTS)
        core.weights.request(folder)
        core.sleep.release(WEIGHTS)  # what replaces another exchange has a limit of its own
        core.sleep.hold(WEIGHTS, limit)
        core.sleep.wake_from_idleness()
        try:
            while core.weights.requested is not None:
                if core.sleep.level:
                    return core.weights.version + 1  # once it has woken
                self._availability.check_serving()
                await self._progress.stepped.park()
        except BaseException:
            if core.weights.requested == folder != core.weights.loading:
                core.weights.withdraw(former)
                core.sleep.release(WEIGHTS)
                if core.weights.requested is not None:
                    core.sleep.hold(WEIGHTS, former_limit)
            raise
        if core.weights.refusal is not None:
            raise core.weights.refusal
        return core.weights.version

    async def _work(self, function: Callable[[], None]) -> None:
        await run_in_thread(function, "reading weights", is_inline=self.config.runner == "inline")

    def _make_updates(self) -> None:
        from triolet.model.folder.exchange import new_updates_folder

        self._updates = new_updates_folder()

    async def _remove_updates(self) -> None:
        if self._updates is not None:
            await self._clean_up(partial(_delete, self._updates))

    def _folders_in_use(self) -> set[str | None]:
        """Return the folders that the runner has loaded, or may yet load; no other one is asked for again."""
        weights = self._core.weights
        return {self.weights_folder, weights.requested, weights.loading}

    async def _clean_up(self, function: Callable[[], None]) -> None:
        is_inline = self.config.runner == "inline"
        await clean_up_in_thread(function, "deleting weights", is_inline=is_inline)


def _delete(folder: Path) -> None:
    """Delete a folder of weights, which may be gigabytes."""
    shutil.rmtree(folder, ignore_errors=True)


def _delete_others(updates: Path, used: Collection[str | None]) -> None:
    """Delete the folders of updates that are not used."""
    with suppress(OSError):  # as those that cannot be deleted, they go with the folder of all of them
        for folder in tuple(updates.iterdir()):
            if str(folder) not in used:
                _delete(folder)


def _absolute(path: str) -> Path:
    # The folder may be read again by a process with another working directory.
    return Path(path).expanduser().absolute()


def check_folder(current: Path, new: Path) -> None:
    """Check the weights of a folder against those in use; see `model.folder.exchange`."""
    # torch takes a second to import, and most engines never exchange their weights.
    from triolet.model.folder.exchange import check_exchange

    check_exchange(current, new)


def write_update(current: Path, new: Path, updates: Mapping[str, Any]) -> None:
    """Make a folder of the weights in use with some other tensors; see `model.folder.exchange`."""
    from triolet.model.folder import exchange

    exchange.write_update(current, new, updates)
