"""The API process's side of the engine: admission, streams, control calls, and the watch over the engine process.

vLLM-Omni's own client does not say that an engine process is gone, and calls in flight can hang for ever when it is.
So the processes are watched here by their sentinels; on a death every stream and call fails at once, and whoever
serves (``on_death``) ends the server.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import orjson
from vllm import SamplingParams
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.arg_utils import register_omni_models_to_vllm
from vllm_omni.entrypoints.async_omni import AsyncOmni

from pega_omni_plugin.engine.config import make_front
from pega_omni_plugin.engine.errors import CallFailed, EngineBusy, EngineDead, EngineTimeout, RequestFailed
from pega_omni_plugin.engine.program import Front, ProgramInfo, Prompt, Speech
from pega_omni_plugin.engine.shared import SWITCH_SECONDS
from pega_omni_plugin.engine.stream import SpeechStream
from pega_omni_plugin.engine.wire import decode_ending, decode_info, encode_speech

logger = init_logger(__name__)

_ENGINE_PROCESS = "StageEngineCoreProc"
_POLL_SECONDS = 1.0
_CALL_SECONDS = 10.0


class EngineClient:
    """Requests and control calls for one engine; use from one event loop."""

    def __init__(self, omni: AsyncOmni, description: Mapping[str, Any]) -> None:
        self.info: ProgramInfo = decode_info(orjson.dumps(description["info"]))
        self.front: Front = make_front(description, self.info)
        self.slots: int = description["slots"]
        self.queue: int = description["queue"]
        self.stats: Mapping[str, Any] = {}
        self.dead: EngineDead | None = None
        self.on_death: Callable[[EngineDead], None] | None = None
        self._stall_seconds: float = description["stall_seconds"]
        self._request_seconds: float = description["request_seconds"]
        self._omni = omni
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams: set[SpeechStream] = set()
        self._requests: set[SpeechStream] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._sentinels: list[int] = []
        self._poll: asyncio.Task[None] | None = None
        # A request needs no sampling parameters of vLLM's; a pipeline wants one set per stage.
        self._sampling = [
            SamplingParams(
                max_tokens=65_535,
                temperature=0.0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                skip_clone=True,
            )
        ]

    @classmethod
    async def connect(cls, omni: AsyncOmni) -> Self:
        """Ask the running engine what it serves and begin to watch its processes."""
        # vLLM-Omni's table of every request costs more than the request; ``stats`` has what matters.
        omni.log_stats = False
        # The orchestrator is a thread of this process, see ``ProgramWorker.init_device``.
        sys.setswitchinterval(SWITCH_SECONDS)
        description = orjson.loads(_unwrap("describe", await omni.collective_rpc("describe", stage_ids=[0])))
        client = cls(omni, description)
        client._watch()
        return client

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, are read by their callers, or are being aborted."""
        return len(self._requests)

    def check_room(self) -> None:
        """Raise what ``speak`` would at this moment, before anything is done for a request."""
        if self.dead is not None:
            raise self.dead
        if self.in_flight >= self.slots + self.queue:
            raise EngineBusy(f"{self.slots} requests run and {self.queue} wait already; try again in a moment")

    @asynccontextmanager
    async def speak(self, speech: Speech, prompt: Prompt) -> AsyncIterator[SpeechStream]:
        """Submit a request; leaving the block aborts what is left of it.

        Raises:
            EngineBusy: all slots are taken and the queue is full.
            EngineDead: the engine process is gone.
        """
        self.check_room()
        stream = SpeechStream(self._stall_seconds, self._request_seconds)
        pump = asyncio.create_task(self._pump(stream, speech, prompt))
        self._streams.add(stream)
        self._requests.add(stream)
        self._pumps.add(pump)
        pump.add_done_callback(partial(self._pumped, stream))
        try:
            yield stream
        finally:
            self._streams.discard(stream)
            pump.cancel()
            self._settle(stream, pump)

    async def call(self, method: str, *args: Any, seconds: float = _CALL_SECONDS) -> Any:
        """Make a control call between two steps of the engine.

        Raises:
            CallFailed: the engine refused it or raised.
            EngineTimeout: no answer in time.
            EngineDead: the engine process is gone.
        """
        if self.dead is not None:
            raise self.dead
        answer = asyncio.ensure_future(self._omni.collective_rpc(method, args=args, stage_ids=[0]))
        try:
            await asyncio.wait({answer, self._death}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()  # nothing if it is done
        if not answer.done():
            raise self.dead or EngineTimeout(f"the engine did not answer {method!r} within {seconds:g} s")
        error = answer.exception()
        if error is None:
            return _unwrap(method, answer.result())
        if isinstance(error, EngineDeadError):
            self._died(str(error))
        raise self.dead or CallFailed(f"control call {method!r}: {error}") from error

    async def drained(self, seconds: float) -> bool:
        """Wait until every request is over; ``False`` when ``seconds`` were not enough."""
        pumps = set(self._pumps)
        return not pumps or not (await asyncio.wait(pumps, timeout=seconds))[1]

    async def close(self) -> None:
        """Stop watching; the engine itself is ended by who started it."""
        loop = asyncio.get_running_loop()
        for sentinel in self._sentinels:
            loop.remove_reader(sentinel)
            os.close(sentinel)
        self._sentinels.clear()
        if self._poll is not None:
            self._poll.cancel()

    async def _pump(self, stream: SpeechStream, speech: Speech, prompt: Prompt) -> None:
        request = {"prompt_token_ids": [0], "additional_information": encode_speech(speech, prompt)}
        reason: str | None = None
        try:
            async for output in self._omni.generate(
                prompt=request, request_id=uuid.uuid4().hex, sampling_params_list=self._sampling
            ):
                audio = (output.multimodal_output or {}).get("audio")
                if audio is not None and audio.numel():
                    stream.put(audio.numpy())
                if output.finished:
                    reason = output.outputs[0].stop_reason
        except EngineDeadError as error:
            self._died(str(error))
            return
        except RuntimeError as error:  # a request's failure, with our reason
            stream.fail(self.dead or RequestFailed(str(error)))
            return
        if reason is None:
            stream.fail(RequestFailed("the engine ended the request without saying why"))
        else:
            stream.put(decode_ending(reason))

    def _pumped(self, stream: SpeechStream, pump: asyncio.Task[None]) -> None:
        self._pumps.discard(pump)
        self._settle(stream, pump)
        error = None if pump.cancelled() else pump.exception()
        if error is not None:  # nothing that we know of; whoever waits must hear of it all the same
            logger.error("a request broke off", exc_info=error)
            stream.fail(RequestFailed(f"the request broke off: {error!r}"))

    def _settle(self, stream: SpeechStream, pump: asyncio.Task[None]) -> None:
        """A request is over when the engine is done with it and its caller has left; a slow reader still counts."""
        if pump.done() and stream not in self._streams:
            self._requests.discard(stream)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for process in multiprocessing.active_children():
            if process.name.startswith(_ENGINE_PROCESS):
                # A copy: vLLM closes the original when it joins the process.
                sentinel = os.dup(process.sentinel)
                self._sentinels.append(sentinel)
                loop.add_reader(sentinel, self._died, f"engine process {process.pid} ended")
        if not self._sentinels:
            raise RuntimeError(f"no child process named {_ENGINE_PROCESS}*: this package watches engines it started")
        self._poll = asyncio.create_task(self._poll_stats())

    async def _poll_stats(self) -> None:
        """Keep ``stats`` fresh for scrapes, and notice what sentinels cannot: a stage that vLLM-Omni gave up, or one
        that lives and answers no more."""
        now = asyncio.get_running_loop().time
        answered = now()
        while self.dead is None:
            try:
                self.stats = orjson.loads(await self.call("stats", seconds=_CALL_SECONDS))
                answered = now()
                async with asyncio.timeout(_CALL_SECONDS):
                    await self._omni.check_health()
            except EngineDeadError as error:
                self._died(str(error))
            except (EngineTimeout, CallFailed, TimeoutError) as error:
                logger.warning("engine statistics: %s", error)
                if now() - answered > self._stall_seconds:
                    self._died(f"the engine has not answered for {self._stall_seconds:g} s")
            except EngineDead:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _died(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = EngineDead(reason)
        logger.error("%s; %d requests fail", reason, len(self._streams))
        loop = asyncio.get_running_loop()
        for sentinel in self._sentinels:
            loop.remove_reader(sentinel)
        for stream in self._streams:
            stream.fail(self.dead)
        self._death.set_result(None)
        if self.on_death is not None:
            self.on_death(self.dead)


def _unwrap(method: str, answers: Any) -> Any:
    """The one worker's answer out of ``[stage][worker]``; vLLM-Omni returns failures instead of raising them."""
    answer = answers[0]
    while isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, dict) and (answer.get("error") or answer.get("supported") is False):
        raise CallFailed(f"control call {method!r}: {answer.get('error') or answer}")
    return answer


def runs_our_program(omni: AsyncOmni) -> bool:
    """Whether the engine behind a vLLM-Omni client is one of ours."""
    schedulers = [getattr(stage, "scheduler_cls", None) for stage in omni.stage_configs]
    return schedulers == ["pega_omni_plugin.engine.scheduler.ProgramScheduler"]


def start_engine(model: str, deploy_config: str | None) -> AsyncOmni:
    """Start vLLM-Omni with the engine process of ``model``; returns when the program is loaded."""
    options = {} if deploy_config is None else {"deploy_config": deploy_config}
    # vLLM-Omni does so only later: until then it takes a checkpoint's own configuration for unknown, tries again after
    # two seconds, and resolves the pipeline without it (see ``registration._resolve``).
    register_omni_models_to_vllm()
    return AsyncOmni(model=model, log_stats=False, **options)
