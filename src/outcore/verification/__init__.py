"""Does a plan train as plain PyTorch would?"""

from outcore.verification.one_device import verify_job as verify_job
from outcore.verification.verdict import ParameterRow as ParameterRow
from outcore.verification.verdict import Verdict as Verdict
