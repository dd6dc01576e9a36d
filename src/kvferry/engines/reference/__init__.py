"""The reference engine: small, exact, in NumPy. It is the oracle of every claim about a handoff."""

from kvferry.engines.grammar import GrammarKind, GrammarText
from kvferry.engines.reference.engine import ReferenceEngine
from kvferry.engines.reference.tokenizer import Tokenizer, chat_prompt, chat_text
from kvferry.engines.reference.weights import Model, ModelConfig, load_smollm2, tiny_model
from kvferry.engines.request import FinishReason, Request, StepOutput, check_sampling, resolve_limits

__all__ = [
    "FinishReason",
    "GrammarKind",
    "GrammarText",
    "Model",
    "ModelConfig",
    "ReferenceEngine",
    "Request",
    "StepOutput",
    "Tokenizer",
    "chat_prompt",
    "chat_text",
    "check_sampling",
    "load_smollm2",
    "resolve_limits",
    "tiny_model",
]
