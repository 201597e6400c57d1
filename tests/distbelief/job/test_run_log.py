from pathlib import Path

from distbelief.job.run_log import SHOWN_MAX, RunLog


def test_a_warning_of_the_links_is_said_once_and_a_flood_of_them_not_at_all(tmp_path: Path) -> None:
    """Machines were not let in, and the screen said "waiting for 1 machine"."""
    file, said = tmp_path / "supervisor.log", list[str]()
    run_log = RunLog(file, "supervisor", tell=said.append)
    run_log.log_link("info", "nothing to see")
    for n in (1, 2, 4):
        run_log.log_link("warning", f"rejected 10.0.0.7: unknown key (so far {n})")
    for n in range(100):
        run_log.log_link("warning", f"rejected 10.0.0.7: key {n}")
    assert said[0].startswith("rejected 10.0.0.7: unknown key (the supervisor's log has all")
    assert len(said) == SHOWN_MAX
    assert len(file.read_text().splitlines()) == 104
