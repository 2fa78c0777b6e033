"""python -m gradsync.run"""

import sys

from gradsync.run import command_line
from gradsync.run.launch import Launch

if __name__ == "__main__":
    sys.exit(Launch(command_line.parse(sys.argv[1:])).run())
