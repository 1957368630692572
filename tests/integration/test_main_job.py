"""The main job through its command line, in processes of its own."""

import csv
import json
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("main_job")  # the tests share one run
