"""Importing this module raises where the connector's base classes may be other ones."""

from __future__ import annotations

import vllm

from kvloop.vllm_plugin.supported_versions import require

require(vllm.__version__)
