"""vLLM-Omni's own Qwen3-TTS pipeline on our CPU platform: its real processes, over HTTP."""

from __future__ import annotations

import io
from pathlib import Path

import httpx
import psutil
import pytest
import soundfile

from pega_omni_plugin.models.qwen3_tts import tiny
from tests.harness import BIN, STAGE_CONFIGS, Server, free_port

FRAME = 1920


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "environment",
    [{"VLLM_PLUGINS": "vllm_omni_register_models,pega_platform"}, {}],
    ids=["our models off", "our models on, which are not asked for"],
)
def test_a_tiny_checkpoint_speaks_and_stops(tmp_path: Path, environment: dict[str, str]) -> None:
    tiny.write(tmp_path / "tiny")
    port = free_port()
    command = [str(BIN / "vllm"), "serve", str(tmp_path / "tiny"), "--omni", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--deploy-config", str(STAGE_CONFIGS / "upstream_qwen3_tts.yaml")]
    with Server(command, tmp_path / "serve.log", port, **environment) as server:
        server.wait_for("/health", seconds=300)
        children = psutil.Process(server.process.pid).children(recursive=True)
        names = [" ".join(child.cmdline()) for child in children]
        # One process a stage: its worker must not have another.
        assert sorted(name.split("_")[1] for name in names if name.startswith("VLLM::")) == ["stage0", "stage1"], names

        body = {"input": "Hello, world.", "voice": "vivian"}
        answer = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
        assert rate == 24_000
        assert len(samples) % FRAME == 0
        # Speech that did not end would run to the stage's max_tokens, 4096 frames.
        assert 2 <= len(samples) // FRAME < 400
        assert samples.std() > 0.01
        # Its own handlers answer, not ours.
        assert httpx.get(f"{server.url}/readyz").status_code == 404

        assert server.stop() == 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
