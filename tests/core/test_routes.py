"""How a request finds its tenant: the order of the look-ups, in tables."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_turnstile.core.model import Code
from gpu_turnstile.core.routes import BadModel, Directory, Missing, Resolved, UnknownModel, Unresolved, resolve

HOUSE = Directory(
    names=("coder", "small", "vl"),
    aliases={"gpt-4o": "coder", "llama3:latest": "small", "openai/gpt-4o": "vl"},
    stems={"Qwen3-Coder-Q4": "coder"},
    capabilities={"vision": ("vl", "coder"), "tools": ("coder",)},
    chains={"auto": ("coder", "small"), "quick": ("small", "gpt-4o"), "guest": (), "broken": ("small", "gone")},
)
WITH_OLLAMA = replace(HOUSE, external="ollama")
BARE = Directory(names=("coder",))

# request: model, capability, residents -> wants, in_place
RESOLVED = {
    "a name": ("coder", None, (), ("coder",), False),
    "an alias": ("gpt-4o", None, (), ("coder",), False),
    "an alias with a slash": ("openai/gpt-4o", None, (), ("vl",), False),
    "an artifact stem": ("Qwen3-Coder-Q4", None, (), ("coder",), False),
    "a name with Ollama's default tag": ("coder:latest", None, (), ("coder",), False),
    "a stem with Ollama's default tag": ("Qwen3-Coder-Q4:latest", None, (), ("coder",), False),
    "an alias written with the tag, asked without": ("llama3", None, (), ("small",), False),
    "an alias written with the tag, asked with it": ("llama3:latest", None, (), ("small",), False),
    "by name the resident makes no difference": ("coder", None, ("small",), ("coder",), False),
    "a capability in its order": ("cap:vision", None, (), ("vl", "coder"), True),
    "a capability the resident has": ("cap:vision", None, ("coder",), ("coder", "vl"), True),
    "a capability the resident lacks": ("cap:vision", None, ("small",), ("vl", "coder"), True),
    "a capability in the header": (None, "tools", (), ("coder",), True),
    "the header goes before the model": ("small", "vision", (), ("vl", "coder"), True),
    "an empty header is none": ("small", "", (), ("small",), False),
    "a capability with Ollama's default tag": ("cap:tools:latest", None, (), ("coder",), True),
    "the default route": ("auto", None, (), ("coder", "small"), True),
    "the default route with Ollama's tag": ("auto:latest", None, (), ("coder", "small"), True),
    "the default route by its long name": ("auto:auto", None, (), ("coder", "small"), True),
    "a route whose resident is in it": ("auto", None, ("small",), ("small", "coder"), True),
    "a route whose resident is not in it": ("auto", None, ("vl",), ("coder", "small"), True),
    "a route with an alias in its chain": ("auto:quick", None, (), ("small", "coder"), True),
    "a missing model goes to the resident": (None, None, ("vl",), ("vl",), True),
    "an empty model is a missing one": ("", None, ("vl",), ("vl",), True),
    "a missing model and an empty card take the default route": (None, None, (), ("coder", "small"), True),
    "a missing model never goes to a stranger": (None, None, ("comfyui",), ("coder", "small"), True),
    "of several residents the first known one": (None, None, ("comfyui", "small", "vl"), ("small",), True),
}


@pytest.mark.parametrize(("model", "capability", "residents", "wants", "in_place"), RESOLVED.values(), ids=RESOLVED)
def test_the_request_finds(
    model: str | None, capability: str | None, residents: tuple[str, ...], wants: tuple[str, ...], in_place: bool
) -> None:
    assert resolve(HOUSE, model, capability, residents) == Resolved(wants, in_place, model or None)


def test_an_empty_route_takes_the_resident_and_must_never_be_the_reason_of_a_swap() -> None:
    assert resolve(HOUSE, "auto:guest", None, ("vl",)) == Resolved(("vl",), True, "auto:guest", stay=True)


@pytest.mark.parametrize("residents", [(), ("comfyui",)])
def test_an_empty_route_fails_cleanly_when_no_model_is_on_the_card(residents: tuple[str, ...]) -> None:
    answer = resolve(HOUSE, "auto:guest", None, residents)
    assert isinstance(answer, Unresolved)
    assert answer.code is Code.SERVICE_INACTIVE


# request: model, capability -> code, close matches
UNRESOLVED = {
    "a typing error": ("codr", None, Code.UNKNOWN_MODEL, ("coder",)),
    "another case": ("Coder", None, Code.UNKNOWN_MODEL, ("coder",)),
    "another tag": ("coder:1b", None, Code.UNKNOWN_MODEL, ("coder",)),
    "nothing like it": ("zzzz", None, Code.UNKNOWN_MODEL, ()),
    "an unknown capability": ("cap:visoin", None, Code.UNKNOWN_MODEL, ("vision",)),
    "an unknown capability in the header": ("coder", "sight", Code.UNKNOWN_MODEL, ()),
    "a capability in another case": (None, "Tools", Code.UNKNOWN_MODEL, ("tools",)),
    "an unknown route": ("auto:quik", None, Code.UNKNOWN_ROUTE, ("auto:quick",)),
    "a route without a name": ("auto:", None, Code.UNKNOWN_ROUTE, ()),
    "a capability without a name": ("cap:", None, Code.UNKNOWN_MODEL, ()),
    "a chain with an entry that is not there": ("auto:broken", None, Code.UNKNOWN_ROUTE, ()),
    "blanks": (" coder", None, Code.UNKNOWN_MODEL, ("coder",)),
}


@pytest.mark.parametrize("house", [HOUSE, WITH_OLLAMA], ids=["alone", "beside an external Ollama"])
@pytest.mark.parametrize(("model", "capability", "code", "close"), UNRESOLVED.values(), ids=UNRESOLVED)
def test_the_request_is_refused_with_what_was_probably_meant(
    house: Directory, model: str | None, capability: str | None, code: Code, close: tuple[str, ...]
) -> None:
    answer = resolve(house, model, capability)
    reserved = capability or str(model).startswith(("auto", "cap:"))
    if house.external and not reserved:
        assert answer == Resolved(("ollama",), False, model)
        return
    assert isinstance(answer, Unresolved)
    assert answer.code is code
    assert answer.close[: len(close)] == close
    assert all(word in answer.message for word in close)
    assert "\n" not in answer.message


def test_a_broken_chain_fails_even_when_the_resident_is_in_it() -> None:
    answer = resolve(HOUSE, "auto:broken", None, ("small",))
    assert isinstance(answer, Unresolved)
    assert '"gone"' in answer.message


@pytest.mark.parametrize("model", ["llama3:8b", "hf.co/org/x-GGUF:Q4_K_M", "Coder"])
def test_the_external_ollama_takes_every_other_name(model: str) -> None:
    assert resolve(WITH_OLLAMA, model) == Resolved(("ollama",), False, model)


def test_a_preset_goes_before_a_model_of_the_external_ollama() -> None:
    assert resolve(WITH_OLLAMA, "small") == Resolved(("small",), False, "small")


def test_a_missing_model_goes_to_the_external_ollama_while_it_holds_the_card() -> None:
    assert resolve(WITH_OLLAMA, None, None, ("ollama",)) == Resolved(("ollama",), True, None)


def test_a_missing_model_without_resident_and_route_is_missing() -> None:
    answer = resolve(BARE, None)
    assert isinstance(answer, Missing)
    assert '"model"' in answer.message


def test_an_empty_default_route_is_no_stand_in_for_a_missing_model() -> None:
    assert isinstance(resolve(replace(BARE, chains={"auto": ()}), None), Missing)


@pytest.mark.parametrize(
    ("model", "kind"),
    [(123, "a number"), (1.5, "a number"), (True, "a boolean"), ([], "a list"), ({}, "an object"), (0, "a number")],
)
def test_a_model_that_is_no_string_is_a_bad_request(model: object, kind: str) -> None:
    answer = resolve(HOUSE, model, "vision", ("coder",))
    assert isinstance(answer, BadModel)
    assert kind in answer.message


LENIENT = replace(HOUSE, unknown=UnknownModel.RESIDENT)


def test_an_unknown_model_goes_to_the_resident_where_the_policy_says_so() -> None:
    assert resolve(LENIENT, "gpt-5", None, ("vl",)) == Resolved(("vl",), True, "gpt-5")


@pytest.mark.parametrize(("residents", "locked"), [(("vl",), True), ((), False), (("comfyui",), False)])
def test_nothing_is_guessed_under_a_lock_or_without_a_resident(residents: tuple[str, ...], locked: bool) -> None:
    assert isinstance(resolve(LENIENT, "gpt-5", None, residents, locked=locked), Unresolved)


def test_the_policy_does_not_excuse_an_unknown_route_or_capability() -> None:
    assert isinstance(resolve(LENIENT, "auto:nope", None, ("vl",)), Unresolved)
    assert isinstance(resolve(LENIENT, "cap:nope", None, ("vl",)), Unresolved)


def test_a_hostile_name_is_shown_short_and_harmless() -> None:
    answer = resolve(HOUSE, "\x1b[31m\r\nX-Evil: 1" + "a" * 100_000)
    assert isinstance(answer, Unresolved)
    assert len(answer.message) < 200
    assert answer.message.isprintable()


def test_a_name_goes_before_an_alias_and_an_alias_before_a_stem() -> None:
    house = Directory(names=("a", "b"), aliases={"a": "b", "x": "b"}, stems={"x": "a"})
    assert house.find("a") == "a"
    assert house.find("x") == "b"


def test_a_chain_that_names_one_preset_twice_wants_it_once() -> None:
    house = replace(HOUSE, chains={"auto": ("coder", "gpt-4o", "coder:latest")})
    assert resolve(house, "auto") == Resolved(("coder",), True, "auto")


@given(
    st.one_of(st.none(), st.text(), st.sampled_from([*HOUSE.known(), "auto:x", "cap:x"])),
    st.one_of(st.none(), st.text(max_size=8), st.sampled_from(["vision", "tools"])),
    st.lists(st.sampled_from(["coder", "small", "vl", "ollama", "comfyui"]), max_size=3).map(tuple),
    st.sampled_from([HOUSE, WITH_OLLAMA, LENIENT, BARE]),
)
def test_nobody_outside_the_directory_is_ever_wanted(
    model: str | None, capability: str | None, residents: tuple[str, ...], house: Directory
) -> None:
    answer = resolve(house, model, capability, residents)
    if isinstance(answer, Resolved):
        assert answer.wants
        assert len(set(answer.wants)) == len(answer.wants)
        assert set(answer.wants) <= {*house.names, house.external}


def test_a_look_up_among_many_presets_takes_microseconds() -> None:
    names = tuple(f"preset-{number}" for number in range(5_000))
    house = Directory(names=names)
    start = perf_counter()
    for _ in range(10_000):
        resolve(house, "preset-4999:latest", None, ("preset-1",))
    assert perf_counter() - start < 0.5  # 50 µs each would be far too slow; it is about 1
