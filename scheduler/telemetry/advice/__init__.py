"""What another setting would gain, planned on the steps that a run just had."""

from .advise import Advice, advise
from .advisor import AdviceWarning, Advisor

__all__ = ["Advice", "AdviceWarning", "Advisor", "advise"]
