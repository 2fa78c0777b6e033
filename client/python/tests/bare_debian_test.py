"""The wheel on a new Debian. Needs debootstrap, the network and a minute."""

from bare_system import new_debian
from two_commands import check


def test_two_commands_train(tmp_path):
    check(new_debian(tmp_path))
