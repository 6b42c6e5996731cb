"""In CI (the variable CI is set) a skipped test is a failed test: everything that could run there must run.

The report begins with the compiler that the machine code is audited of: budgets are measured with one.
"""

import os

import pytest

from kdagen import toolchain
from kdagen.audit import MEASURED_WITH


def pytest_report_header(config):
    found = toolchain.candidates("hip")
    version = found[0].version if found else "none"
    return f"HIP compiler: {version}; the audit's budgets were measured with {MEASURED_WITH}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where nothing may be skipped: {report.longrepr}"
    return report
