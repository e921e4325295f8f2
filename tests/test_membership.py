"""A PC keeps its identity and its mesh over restarts, and leaves a mesh only when somebody says so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshinfer.agent import membership
from meshinfer.errors import TokenError, UserError

NOW = 1_800_000_000.0
DAY = 86_400.0


def token_of(home: Path, expires: float = NOW + DAY) -> str:
    if not membership.is_member(home):
        membership.create_mesh(home, home.name, now_unix=NOW)
    return membership.make_token(home, expires)


def test_an_identity_lasts(tmp_path: Path) -> None:
    first = membership.load_or_create_identity(tmp_path / "home")
    assert membership.load_or_create_identity(tmp_path / "home").peer == first.peer
    assert membership.load_or_create_identity(tmp_path / "other").peer != first.peer


def test_a_damaged_identity_is_told_and_not_replaced(tmp_path: Path) -> None:
    """A new one in its place would make this PC a stranger to its mesh, without a word."""
    membership.load_or_create_identity(tmp_path)
    path = tmp_path / membership.IDENTITY_FILE
    damaged = path.read_bytes()[:-1]
    path.write_bytes(damaged)
    with pytest.raises(TokenError):
        membership.load_or_create_identity(tmp_path)
    assert path.read_bytes() == damaged


def test_a_mesh_has_all_who_joined(tmp_path: Path) -> None:
    token = token_of(tmp_path / "a")
    joined = membership.join(tmp_path / "b", token, "büro", now_unix=NOW)
    identity = membership.load_or_create_identity(tmp_path / "b")
    stored = membership.load_membership(tmp_path / "b", identity, NOW)
    assert stored == joined
    assert stored.member(identity, NOW).name == "büro"
    founder = membership.load_or_create_identity(tmp_path / "a")
    founded = membership.load_membership(tmp_path / "a", founder, NOW)
    assert founded is not None
    assert founded.mesh == joined.mesh


def test_an_expired_token_leaves_all_as_it_was(tmp_path: Path) -> None:
    token = token_of(tmp_path / "a")
    with pytest.raises(TokenError, match="expired"):
        membership.join(tmp_path / "b", token, "b", now_unix=NOW + 2 * DAY)
    assert not membership.is_member(tmp_path / "b")


def test_only_where_it_was_created_can_a_mesh_invite(tmp_path: Path) -> None:
    membership.join(tmp_path / "b", token_of(tmp_path / "a"), "b", now_unix=NOW)
    with pytest.raises(UserError, match="mesh create"):
        membership.make_token(tmp_path / "b", NOW + DAY)


def test_a_mesh_is_left_only_on_purpose_and_its_key_is_kept(tmp_path: Path) -> None:
    other = token_of(tmp_path / "b")
    mine = membership.create_mesh(tmp_path / "a", "a", now_unix=NOW)
    with pytest.raises(UserError, match="--replace"):
        membership.join(tmp_path / "a", other, "a", now_unix=NOW)
    with pytest.raises(UserError, match="--replace"):
        membership.create_mesh(tmp_path / "a", "a", now_unix=NOW)
    new = membership.create_mesh(tmp_path / "a", "a", replace=True, now_unix=NOW)
    assert new.mesh != mine.mesh
    assert (tmp_path / "a" / f"mesh-{mine.mesh[:8]}.key").exists()


def test_joining_the_own_mesh_again_does_no_harm(tmp_path: Path) -> None:
    token = token_of(tmp_path / "a")
    first = membership.join(tmp_path / "b", token, "b", now_unix=NOW)
    assert membership.join(tmp_path / "b", token, "b", now_unix=NOW + 60).mesh == first.mesh


def test_the_configured_token_joins_once(tmp_path: Path) -> None:
    token = token_of(tmp_path / "a")
    identity = membership.load_or_create_identity(tmp_path / "b")
    assert membership.ensure_membership(tmp_path / "b", identity, None, "b", NOW) is None
    first = membership.ensure_membership(tmp_path / "b", identity, token, "b", NOW)
    # At every later start the token is still in the file, and long expired.
    later = membership.ensure_membership(tmp_path / "b", identity, token, "b", NOW + 30 * DAY)
    assert later == first


def test_a_token_of_another_mesh_in_the_configuration_wins(tmp_path: Path) -> None:
    identity = membership.load_or_create_identity(tmp_path / "c")
    membership.ensure_membership(tmp_path / "c", identity, token_of(tmp_path / "a"), "c", NOW)
    moved = membership.ensure_membership(tmp_path / "c", identity, token_of(tmp_path / "b"), "c", NOW)
    other = membership.load_membership(
        tmp_path / "b", membership.load_or_create_identity(tmp_path / "b"), NOW
    )
    assert moved is not None
    assert other is not None
    assert moved.mesh == other.mesh


def test_a_damaged_token_in_the_configuration_is_told(tmp_path: Path) -> None:
    identity = membership.load_or_create_identity(tmp_path)
    with pytest.raises(TokenError):
        membership.ensure_membership(tmp_path, identity, "meshinfer1-xyz", "x", NOW)


def test_the_clock_is_the_systems_by_default(tmp_path: Path) -> None:
    membership.create_mesh(tmp_path / "a", "a")
    token = membership.make_token(tmp_path / "a", time.time() + 60)
    membership.join(tmp_path / "b", token, "b")
