"""Outcomes, runs and errors as lines, tables and JSON objects. Nothing here prints."""

from tasks.report.checks import check_table
from tasks.report.lines import (
    Paper,
    exit_code,
    failure,
    folded,
    last_line,
    manual,
    operation_name,
    outcome_line,
    plan_line,
    summary,
)
from tasks.report.objects import error_object, outcome_object
from tasks.report.runs import last_words, run_words, status_table

__all__ = [
    "Paper",
    "check_table",
    "error_object",
    "exit_code",
    "failure",
    "folded",
    "last_line",
    "last_words",
    "manual",
    "operation_name",
    "outcome_line",
    "outcome_object",
    "plan_line",
    "run_words",
    "status_table",
    "summary",
]
