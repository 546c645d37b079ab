"""Namespace of cached KV blocks: requests share blocks only within one."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class CacheNamespace:
    """Everything but the tokens that the KV of a request depends on, or that keeps it from others.

    Args:
        salt: chosen by the caller, so that the timing of other requests tells nothing of its prompts.
        adapter: name of the adapter that the KV is computed with; None for none.
        weights_version: counts the changes of the model's weights.
    """

    salt: str | None = None
    adapter: str | None = None
    weights_version: int = 0

    def to_bytes(self) -> bytes:
        """Return bytes that differ for any two namespaces, to be hashed."""
        parts = [
            b"" if text is None else b"\x01" + text.encode("utf-8", "surrogatepass")
            for text in (self.salt, self.adapter)
        ]
        # The length of each text stands before it: ("ab", "c") and ("a", "bc") differ.
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return framed + self.weights_version.to_bytes(8, "big")


DEFAULT_NAMESPACE = CacheNamespace()
