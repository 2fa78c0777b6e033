"""tools/checks/count_cases.py, with reports as GoogleTest and pytest write them."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "checks"))

import count_cases  # noqa: E402

GOOGLETEST = """\
<testsuites><testsuite>
  <testcase name="Goes" status="run" result="completed" classname="Pods" />
  <testcase name="Other" status="run" result="skipped" classname="Pods">
    <skipped message="tests/pods_test.cc:37&#x0A;no cgroups"><![CDATA[tests/pods_test.cc:37
no cgroups]]></skipped>
  </testcase>
  <testcase name="Third" status="run" result="skipped" classname="Pods">
    <skipped message="tests/pods_test.cc:37&#x0A;no cgroups"><![CDATA[tests/pods_test.cc:37
no cgroups]]></skipped>
  </testcase>
  <testcase name="DISABLED_Last" status="notrun" result="suppressed" classname="Pods" />
</testsuite></testsuites>
"""
PYTEST = """\
<testsuites><testsuite><testcase classname="one_test" name="test_goes" /><testcase
  classname="one_test" name="test_gpu"><skipped type="pytest.skip"
  message="no GPU">/tests/one_test.py:3: no GPU</skipped></testcase></testsuite></testsuites>
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Counts one run of tests with these reports. Returns the lines that it prints."""

    def run_once(**reports):
        lines = []
        for name, report in reports.items():
            path = tmp_path / f"{name}.xml"
            path.write_text(report)
            output = {"name": "test.xml", "uri": path.as_uri()}
            result = {"status": "PASSED", "testActionOutput": [output]}
            event = {"id": {"testResult": {"label": f"//tests:{name}"}}, "testResult": result}
            lines.append(json.dumps(event))
        (tmp_path / "opt.json").write_text("\n".join(lines))
        (tmp_path / "opt.status").write_text("0")
        monkeypatch.setattr(sys, "argv", ["count_cases.py", str(tmp_path), "opt"])
        assert count_cases.main() == 0
        return capsys.readouterr().out.splitlines()

    return run_once


def test_says_why_cases_were_skipped(run):
    assert run(pods_test=GOOGLETEST, one_test=PYTEST) == [
        "Skipped:",
        "  1 of opt //tests:one_test: no GPU",
        "  1 of opt //tests:pods_test: disabled, or without a reason",
        "  2 of opt //tests:pods_test: no cgroups",
        "2 passed, 0 failed, 4 skipped",
    ]


def test_is_short_if_all_passed(run):
    passed = '<testsuites><testsuite><testcase name="a" /></testsuite></testsuites>'
    assert run(one_test=passed) == ["1 passed, 0 failed"]
