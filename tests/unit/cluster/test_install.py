"""Setup: starts pip once per pyproject.toml, and says first when a CUDA build would come to a machine without a GPU."""

import pytest

from cluster.cli import install

CUDA = ["filelock", "nvidia-cudnn-cu13==9.1; platform_system == 'Linux'", "triton==3.6; platform_system == 'Linux'"]


def test_the_fingerprint_follows_pyproject():
    assert install.fingerprint(b"one") == install.fingerprint(b"one")
    assert install.fingerprint(b"one") != install.fingerprint(b"two")


@pytest.mark.parametrize(
    ("version", "requirements", "has_gpu", "is_told"),
    [
        ("2.13.0", CUDA, False, True),
        ("2.13.0", CUDA, True, False),
        ("2.13.0+cpu", ["filelock"], False, False),
        ("2.13.0", ["filelock"], False, False),
        ("", [], False, False),
    ],
)
def test_the_cuda_build_is_told_only_where_it_is_a_surprise(version, requirements, has_gpu, is_told):
    assert install.needs_cuda_notice(version, requirements, has_gpu) is is_told


def test_a_fresh_environment_starts_no_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(install, "STAMP", tmp_path / "stamp")
    (tmp_path / "python").touch()
    (tmp_path / "stamp").write_text(install.fingerprint((install.ROOT / "pyproject.toml").read_bytes()))
    ran = []
    monkeypatch.setattr(install, "run_step", lambda *step, **hint: ran.append(step))
    install.setup()
    assert ran == []


def test_a_changed_pyproject_installs_again_and_remembers(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(install, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(install, "has_module", lambda name: True)
    monkeypatch.setattr(install, "torch_on_offer", lambda: ("2.13.0+cpu", []))
    (tmp_path / "python").touch()
    (tmp_path / "stamp").write_text("of an older pyproject.toml")
    ran = []
    monkeypatch.setattr(install, "run_step", lambda title, command, hint: ran.append(title))
    install.setup()
    install.setup()
    assert [title.split()[0] for title in ran] == ["packages"]


def test_pips_words_show_only_when_it_fails(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(install, "LOG", tmp_path / "log")
    noisy = ["sh", "-c", "echo 'Location x is ignored: gone'; echo chatter"]
    install.run_step("quiet", noisy, hint="no hint")
    shown = capsys.readouterr().out
    assert "quiet" in shown
    assert "chatter" not in shown
    with pytest.raises(install.SetupFailed, match="chatter") as raised:
        install.run_step("loud", [*noisy[:2], noisy[2] + "; exit 3"], hint="look there")
    assert "look there" in str(raised.value)
    assert "is ignored" not in str(raised.value)
