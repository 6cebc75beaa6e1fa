"""A group, as control knows it: a record of parts, each of which alone writes its fields."""

from gradserver.engine.control.group.applicants import Applicant, Applicants
from gradserver.engine.control.group.group import Group, State
from gradserver.engine.control.group.origin import Origin
from gradserver.engine.control.group.shards import HERE, VACANT

__all__ = ["HERE", "VACANT", "Applicant", "Applicants", "Group", "Origin", "State"]
