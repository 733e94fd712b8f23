"""The commands. Heavy imports happen inside the functions, so that usage errors appear at once."""

import sys

from medusa_train.console_streams import print_uncaught

sys.excepthook = print_uncaught
