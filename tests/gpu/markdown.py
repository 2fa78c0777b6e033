"""The report as Markdown."""


def markdown(report):
    machine = report["machine"]
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in machine["gpus"])
    lines = []
    if "not_a_measurement" in report:
        lines += [f"**Not a measurement: {report['not_a_measurement']}.**", ""]
    lines += [
        f"# GPU check, {report['date']}",
        "",
        f"Commit {report['commit']}. {gpus or machine.get('error', 'no GPU')}.",
        f"Driver {machine['driver'] or 'unknown'}, CUDA {machine.get('driver_cuda', 'unknown')}, "
        f"NCCL {machine['nccl'] or 'none'}.",
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, glibc "
        f"{machine['glibc']}.",
        "",
    ]
    if report["packages"]:
        torch = report["packages"].get("torch", "no PyTorch")
        lines += [f"Python {report['packages']['python']}, PyTorch {torch}.", ""]
    if not report["complete"]:
        lines += ["The run has not come to its end: what is missing below was not asked.", ""]
    lines += ["## Targets", "", "| | target | measured | |", "|---|---|---|---|"]
    for row in report["targets"]:
        value = "-" if row["value"] is None else row["value"]
        lines.append(f"| {row['name']} | {row['target']} | {value} | {row['verdict']} |")
    lines += ["", "## Experiments", "", "| | answer | why | facts |", "|---|---|---|---|"]
    for row in report["experiments"]:
        facts = ", ".join(
            f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.get("facts", {}).items()
        )
        lines.append(f"| {row['name']} | {row['verdict']} | {row.get('why', '')} | {facts} |")
    lines += ["", "## Tests", "", "In part: up to the point that needs the fakes.", ""]
    lines += ["| | verdict | passed | in part | skipped | |", "|---|---|---|---|---|---|"]
    for row in report["tests"]:
        lines.append(
            f"| {row['name']} | {row['verdict']} | {len(row.get('passed', []))} | "
            f"{len(row.get('passed_in_part', []))} | {len(row.get('skipped', []))} | "
            f"{row.get('why', '')} |"
        )
    for row in report["python"]:
        lines.append(f"| {row['name']} | {row['verdict']} | | | | {row.get('why', '')} |")
    lines += ["", "## Benches", ""]
    for row in report["benches"]:
        lines += [f"{row['name']}: {row['verdict']}{': ' + row['why'] if 'why' in row else ''}", ""]
        if row.get("table"):
            lines += ["```", row["table"], "```", ""]
    return "\n".join(lines).rstrip() + "\n"
