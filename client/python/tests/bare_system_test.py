"""The wheel on a system with the packages of Python alone."""

from bare_system import copy_of_this_system
from two_commands import check


def test_two_commands_train(tmp_path):
    check(copy_of_this_system(tmp_path))
