"""Whether a device can take one more container: a pure test per sharing regime; knows no node and no ledger."""

from shared.admission.gated import GatedTotals, gated_exact, gated_linear
from shared.admission.gated_rows import NO_SLACK, Answers, GatedRows, Newcomer
from shared.admission.kinds import admit, admit_kind, hard_guarantee
from shared.admission.learned import EXPLORED, Bound, DeviceType, Learned, Profile, Tenant, explores
from shared.admission.many import Loads
from shared.admission.measured import by_measure, deciding, measured, tenant_of
from shared.admission.response_times import NEVER_US, ResponseTimes
from shared.admission.slowdown import Beside, Way, composed_us
from shared.admission.tasks import RtTask, Sharing, Verdict
from shared.admission.time_sliced import nu_max, response_bound_us, slices

__all__ = [
    "EXPLORED",
    "NEVER_US",
    "NO_SLACK",
    "Answers",
    "Beside",
    "Bound",
    "DeviceType",
    "GatedRows",
    "GatedTotals",
    "Learned",
    "Loads",
    "Newcomer",
    "Profile",
    "ResponseTimes",
    "RtTask",
    "Sharing",
    "Tenant",
    "Verdict",
    "Way",
    "admit",
    "admit_kind",
    "by_measure",
    "composed_us",
    "deciding",
    "explores",
    "gated_exact",
    "gated_linear",
    "hard_guarantee",
    "measured",
    "nu_max",
    "response_bound_us",
    "slices",
    "tenant_of",
]
