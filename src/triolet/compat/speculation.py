"""vLLM's `speculative_config` as fields of `EngineConfig`, for the method `ngram` only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from triolet.compat.refusals import refuse
from triolet.errors import ConfigError

NGRAM_KEYS: Final = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
DEFAULT_LOOKUP: Final = 5  # vLLM's, for both bounds


def speculation_fields(given: Any) -> dict[str, Any]:
    """Translate a `speculative_config` to fields of `EngineConfig`.

    Args:
        given: vLLM's mapping; None for no speculation.
    Raises:
        UnsupportedFeature: another method, or a key that the method does not have here.
        ConfigError: a value out of range, or `num_speculative_tokens` is missing.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError("speculative_config", "a mapping", given)
    method = given.get("method") or given.get("model")
    if method not in ("ngram", "[ngram]"):
        refuse(f"speculative_config method {method!r}", "the method is ngram", given)
    for name in given:
        if name not in NGRAM_KEYS and given[name] is not None:
            refuse(f"speculative_config {name!r}", "the method ngram has " + ", ".join(NGRAM_KEYS), given)
    least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if least is None:
        least = DEFAULT_LOOKUP if most is None else most
    if most is not None and not _is_whole(most, at_least=least):
        raise ConfigError("prompt_lookup_max", f"a whole number of at least prompt_lookup_min={least}", most)
    if given.get("num_speculative_tokens") is None:
        raise ConfigError("num_speculative_tokens", "there, beside the method", None)
    # Of vLLM's two bounds on the length of a matching n-gram only the lower one is a field here: of several matches the
    # longest is proposed, also beyond `prompt_lookup_max`. No answer depends on which draft was proposed.
    return {
        "speculative": "ngram",
        "num_speculative_tokens": given["num_speculative_tokens"],
        "prompt_lookup_min": least,
    }


def _is_whole(value: object, *, at_least: object) -> bool:
    numbers = all(isinstance(one, int) and not isinstance(one, bool) for one in (value, at_least))
    return numbers and value >= at_least  # type: ignore[operator]
