"""From a model's name to a folder: on this machine, from a hub, and when the hub says no or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.model.folder.fake_hub import COMMIT, FakeHub, fake_hub
from tests.model.gguf.tiny_gguf import write_gguf
from tests.model.tiny import make_model
from triolet.core.load_progress import LoadProgress
from triolet.errors import HubUnreachable, ModelFileError, ModelNotFound
from triolet.model.folder.hub import gguf_kinds, resolve_folder
from triolet.model.loading.model import load_model

MODEL = "somebody/tiny-llama"


def point_to(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    return folder


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        point_to(hub.endpoint, monkeypatch)
        hub.folders[MODEL] = make_model("llama", tmp_path / "repository", with_tokenizer=True)
        yield hub


@pytest.fixture
def unreachable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://127.0.0.1:9", monkeypatch)  # the discard port: nothing listens


# ----------------------------------------------------------------------------------------- folders here


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_folder(str(tmp_path)) == tmp_path


def test_a_revision_of_what_is_on_this_machine_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_folder(str(tmp_path), revision="zzz") == tmp_path
    expected = f"revision has no effect: model {str(tmp_path)!r} is on this machine; got 'zzz'"
    assert caplog.messages == [expected]


def test_a_folder_relative_to_the_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert resolve_folder("~/mine") == tmp_path / "mine"


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config.json: is missing"):
        resolve_folder(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c", "no spaces", "x" * 200, "x" * 5000, "a\0b", ""],
)
def test_what_can_not_be_a_hub_id_is_not_asked_for(name: str, unreachable: None) -> None:
    with pytest.raises(ModelNotFound, match=r"must be a folder with a config\.json or a hub id"):
        resolve_folder(name)


def test_a_file_is_not_a_folder(tmp_path: Path, unreachable: None) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"model\.bin"):
        resolve_folder(str(tmp_path / "model.bin"))


# ---------------------------------------------------------------------------------------------- the hub


def test_a_hub_id_is_fetched_and_loads(hub: FakeHub) -> None:
    reports: list[LoadProgress] = []
    loaded = load_model(MODEL, on_progress=reports.append)
    assert loaded.model.spec.backend == "native"
    assert loaded.folder.name == COMMIT
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= hub.fetched()
    downloads = [report for report in reports if report.stage == "download"]
    assert downloads[-1].done_bytes == downloads[-1].total_bytes > 100_000
    assert reports[-1].stage == "weights"


def test_what_is_in_the_cache_is_not_fetched_again(hub: FakeHub) -> None:
    folder = resolve_folder(MODEL)
    hub.requests.clear()
    assert resolve_folder(MODEL) == folder
    assert not hub.fetched()


def test_what_is_in_the_cache_serves_without_a_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_folder(MODEL)
    point_to("http://127.0.0.1:9", monkeypatch)
    assert resolve_folder(MODEL) == folder


def test_the_same_weights_in_other_forms_are_left_alone(hub: FakeHub) -> None:
    repository = hub.folders[MODEL]
    unwanted = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/m.safetensors",
    ]
    for name in unwanted:
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(b"x")
    resolve_folder(MODEL)
    assert hub.fetched() == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip


def test_the_weights_of_the_modules_of_sentence_transformers_are_fetched(hub: FakeHub) -> None:
    for name, text in (("1_Pooling/config.json", "{}"), ("2_Dense/model.safetensors", "weights")):
        (hub.folders[MODEL] / name).parent.mkdir()
        (hub.folders[MODEL] / name).write_text(text, encoding="utf-8")
    assert (resolve_folder(MODEL) / "2_Dense" / "model.safetensors").read_text(encoding="utf-8") == "weights"


def test_a_revision_is_asked_for_by_name(hub: FakeHub) -> None:
    assert resolve_folder(MODEL, revision=COMMIT).name == COMMIT
    with pytest.raises(ModelNotFound, match="no revision 'experimental'"):
        resolve_folder(MODEL, revision="experimental")


def test_a_gated_model_needs_its_token(hub: FakeHub) -> None:
    hub.gated.add(MODEL)
    with pytest.raises(ModelNotFound, match=r"gated.*HF_TOKEN"):
        resolve_folder(MODEL)
    assert (resolve_folder(MODEL, token=hub.token) / "config.json").is_file()


def test_an_id_that_the_hub_does_not_know_is_not_found(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match="'somebody/nothing' is neither a folder here nor a model"):
        resolve_folder("somebody/nothing")


def test_a_repository_without_a_config_is_not_a_model(hub: FakeHub) -> None:
    (hub.folders[MODEL] / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config.json: is missing"):
        resolve_folder(MODEL)


def test_an_unreachable_hub_is_said_and_nothing_stays(unreachable: None, cache: Path) -> None:
    with pytest.raises(HubUnreachable, match="not in the local cache"):
        resolve_folder(MODEL)
    assert not list(cache.rglob("*"))


def test_a_hub_that_is_down_is_said(hub: FakeHub) -> None:
    hub.down = True
    with pytest.raises(HubUnreachable):
        resolve_folder(MODEL)


def test_a_download_that_breaks_off_is_never_taken_for_a_model(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    hub.breaks_off.add("model.safetensors")
    with pytest.raises(HubUnreachable, match="broke off"):
        resolve_folder(MODEL)
    with monkeypatch.context() as patch:
        point_to("http://127.0.0.1:9", patch)
        with pytest.raises(HubUnreachable, match="not all of it"):
            resolve_folder(MODEL)
    hub.breaks_off.clear()
    assert load_model(MODEL).model.spec.backend == "native"


@pytest.mark.parametrize("name", ["model.gguf", "Model.Q4_K_M.GGUF"])
def test_a_gguf_file_is_taken_for_what_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    assert resolve_folder(str(tmp_path / name)) == tmp_path / name
    with pytest.raises(ModelNotFound, match="there is no file"):
        resolve_folder(f"org/{name}")


GGUF_REPOSITORY = "somebody/tiny-GGUF"


@pytest.fixture
def ggufs(hub: FakeHub, tmp_path: Path) -> Path:
    """A repository as they are on the hub: one file per type, one of them in a folder and in parts."""
    folder = tmp_path / "ggufs"
    whole = write_gguf(make_model("llama-plain", tmp_path / "plain"), tmp_path / "whole.gguf", "Q8_0")
    for name in ("Tiny-Q8_0", "Tiny-Q4_K_M", "Tiny-Q4_K_S", "tiny.q5_0", "mmproj-Tiny-Q8_0"):
        (folder / f"{name}.gguf").parent.mkdir(exist_ok=True)
        (folder / f"{name}.gguf").write_bytes(whole.read_bytes())
    for part in (1, 2):
        (folder / "BF16").mkdir(exist_ok=True)
        (folder / "BF16" / f"Tiny-BF16-0000{part}-of-00002.gguf").write_bytes(b"GGUF%d" % part)
    hub.folders[GGUF_REPOSITORY] = folder
    return folder


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("Q8_0", ["Tiny-Q8_0.gguf"]),
        ("q4_k_m", ["Tiny-Q4_K_M.gguf"]),
        ("Q5_0", ["tiny.q5_0.gguf"]),
        ("BF16", ["Tiny-BF16-00001-of-00002.gguf", "Tiny-BF16-00002-of-00002.gguf"]),
    ],
)
def test_a_type_after_a_hub_id_fetches_the_gguf_file_of_that_type_alone(
    kind: str, names: list[str], hub: FakeHub, ggufs: Path
) -> None:
    assert resolve_folder(f"{GGUF_REPOSITORY}:{kind}").name == names[0]
    assert hub.fetched() == set(names)


def test_a_gguf_file_of_the_hub_loads_and_then_needs_no_connection(
    hub: FakeHub, ggufs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"{GGUF_REPOSITORY}:Q8_0"
    assert load_model(model).model.spec.architecture == "LlamaForCausalLM"
    point_to("http://127.0.0.1:9", monkeypatch)
    assert resolve_folder(model).name == "Tiny-Q8_0.gguf"


def test_a_type_that_a_repository_lacks_or_has_twice_is_refused(hub: FakeHub, ggufs: Path) -> None:
    with pytest.raises(ModelNotFound, match="must have one GGUF file of type 'Q2_K'; found none"):
        resolve_folder(f"{GGUF_REPOSITORY}:Q2_K")
    (ggufs / "Other-Q8_0.gguf").write_bytes(b"GGUF")
    hub.folders["somebody/two-GGUF"] = ggufs
    with pytest.raises(ModelNotFound, match=r"found Other-Q8_0\.gguf, Tiny-Q8_0\.gguf"):
        resolve_folder("somebody/two-GGUF:Q8_0")


def test_every_gguf_file_of_a_folder_has_the_type_that_finds_it(hub: FakeHub, ggufs: Path) -> None:
    (ggufs / "Other-Q4_K_S.gguf").write_bytes(b"GGUF")  # so that this type finds two
    found = gguf_kinds(ggufs)
    assert {kind: path.name for kind, path in found.items()} == {
        "BF16": "Tiny-BF16-00001-of-00002.gguf",
        "Q4_K_M": "Tiny-Q4_K_M.gguf",
        "Q8_0": "Tiny-Q8_0.gguf",
        "q5_0": "tiny.q5_0.gguf",
    }
    for kind, path in found.items():
        assert resolve_folder(f"{GGUF_REPOSITORY}:{kind}").name == path.name


def test_a_repository_or_folder_of_gguf_files_is_refused_with_what_to_name(hub: FakeHub, ggufs: Path) -> None:
    with pytest.raises(
        ModelFileError, match=f"is missing; .* with its type, such as {GGUF_REPOSITORY}:Q4_K_M"
    ):
        resolve_folder(GGUF_REPOSITORY)
    file = ggufs / "Tiny-Q4_K_M.gguf"
    with pytest.raises(ModelFileError, match=f"is missing; a GGUF file is a model by itself, such as {file}"):
        resolve_folder(str(ggufs))


@pytest.mark.parametrize("page", ["https://huggingface.co/", "huggingface.co/", "hf.co/"])
def test_the_address_of_a_page_of_the_hub_is_refused_with_the_id(page: str) -> None:
    with pytest.raises(ModelNotFound, match=r"on the hub it is 'Qwen/Qwen3-0\.6B'"):
        resolve_folder(f"{page}Qwen/Qwen3-0.6B")
