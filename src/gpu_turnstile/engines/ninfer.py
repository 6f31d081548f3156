"""NInfer's server: one artifact, one sequence at a time, and no word about whether it works on one.

It takes connections before its model is loaded and answers them only afterwards: until then a probe finds nobody.
`/health` needs no key and says nothing but that the model is there. A chat must name the model that `--model-id`
names; `/v1/models` tells which that is.
"""

from __future__ import annotations

from typing import ClassVar

from gpu_turnstile.engines.openai_server import OpenAIServer


class NInfer(OpenAIServer):
    kind: ClassVar[str] = "ninfer"
