"""Peers on hosts that are reached by SSH. A host remembers its peers in files; each is kept there by a `shoal launch local` that needs
neither the connection nor this launcher.

A host that does not answer counts as lost once it has not for LOST_S: its peers are started on hosts that are free.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.launcher.pools.pool import Peers, States

LOST_S = 60.0
CALL_S = 60.0  # for one call of ssh
AT_ONCE = 16  # calls
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
KILLED = 137  # a peer whose keeper has ended without a word

# One line for each peer: its number, and "-" while it runs, else its exit code.
_LIST = """cd {folder} 2>/dev/null || exit 0
for file in *.pid; do
  [ -e "$file" ] || continue
  number=${{file%.pid}}
  if [ -e "$number.code" ]; then echo "$number $(cat "$number.code")"
  elif ps -o args= -p "$(cat "$file")" | grep -q {title}; then echo "$number -"
  else echo "$number {killed}"; fi
done
"""
# The shell around the keeper writes its exit code; a signal to the group leaves it alive for that. A peer has a group of its own.
_START = """set -e
umask 077
mkdir -p {folder}
cat > {folder}/invite
rm -f {folder}/{number}.code {folder}/{number}.pid
setsid sh -c {kept} {title} > {folder}/{number}.out 2>&1 < /dev/null &
while [ ! -s {folder}/{number}.pid ]; do sleep 0.1; done
"""
_KEPT = """trap : TERM
echo $$ > {folder}/{number}.pid
{command}
echo $? > {folder}/{number}.new
mv {folder}/{number}.new {folder}/{number}.code
"""
_SIGNAL = "kill -s TERM -- -$(cat {folder}/{number}.pid)"


class SshPool:
    poll_s = 5.0

    def __init__(self, peers: Peers, hosts: Sequence[str], ssh: Sequence[str] = ("ssh",)) -> None:
        """`hosts`: for one peer each; one that is named twice takes two. `ssh`: the command with its options."""
        self._peers, self._hosts, self._ssh = peers, Counter(hosts), tuple(ssh)
        self._answers: dict[str, tuple[float, dict[int, int | None]]] = {
            host: (time.monotonic(), {}) for host in self._hosts
        }
        self._failed: dict[str, float] = {}  # when a peer ended there
        self._silent: set[str] = set()

    def states(self) -> States:
        now = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for host, answer in zip(self._hosts, threads.map(self._list, self._hosts), strict=True):
                if answer is not None:
                    self._answers[host] = now, answer
                    self._silent.discard(host)
                else:
                    self._silent.add(host)
        states: dict[int, int | None] = {}
        for at_s, answer in self._answers.values():
            if now - at_s < LOST_S:
                states |= {number: code for number, code in answer.items() if states.get(number, 0) is not None}
        return states

    def start(self, number: int) -> None:
        for host, (_, answer) in self._answers.items():
            if number in answer:
                self._failed[host] = time.monotonic()
                del answer[number]
        host = self._free()
        command = shlex.join(self._peers.local(f"@{self._folder(host)}/invite", number))
        kept = self._script(host, _KEPT, number=number, command=command)
        error = self._call(host, self._script(host, _START, number=number, kept=kept), self._peers.invite)[1]
        if error:
            self._failed[host] = time.monotonic()
            raise ValueError(f"{host}: {error}")
        self._answers[host][1][number] = None

    def drain(self, number: int) -> None:
        for host, (_, answer) in self._answers.items():
            if number in answer and answer[number] is None:
                error = self._call(host, self._script(host, _SIGNAL, number=number))[1]
                if error:
                    raise ValueError(f"{host}: {error}")

    stop = drain  # the second time it ends at once

    def log(self, number: int) -> str:
        host = next((host for host, (_, answer) in self._answers.items() if number in answer), "its host")
        return f"{host}:{self._peers.directory(number)}.log"

    def _free(self) -> str:
        """The host where a peer is started: one that answers and has room, the one whose last failure is the longest ago."""
        room = [
            host
            for host, most in self._hosts.items()
            if host not in self._silent and sum(code is None for code in self._answers[host][1].values()) < most
        ]
        if not room:
            silent = f"; {', '.join(sorted(self._silent))} cannot be reached" if self._silent else ""
            raise ValueError(f"no host is free{silent}")
        return min(room, key=lambda host: self._failed.get(host, 0.0))

    def _list(self, host: str) -> dict[int, int | None] | None:
        """None: it does not answer."""
        output, error = self._call(host, self._script(host, _LIST, killed=KILLED))
        if error:
            return None
        pairs = (line.split() for line in output.splitlines())
        return {int(number): None if code == "-" else int(code) for number, code in pairs}

    def _folder(self, host: str) -> str:
        """Of what the host's keepers write: hosts may share a file system."""
        return f"{self._peers.base}/{self._peers.title}/{host}"

    def _script(self, host: str, script: str, **values: object) -> str:
        words = {"folder": self._folder(host), "title": self._peers.title, **values}
        quoted = {name: word if name == "command" else shlex.quote(str(word)) for name, word in words.items()}
        return script.format(**quoted)

    def _call(self, host: str, script: str, given: str = "") -> tuple[str, str]:
        """Output, and what is wrong; ''. The invite travels by standard input: an argument would show it to every user there."""
        try:
            done = subprocess.run(
                [*self._ssh, *OPTIONS, host, "sh", "-c", shlex.quote(script)],
                input=given,
                capture_output=True,
                text=True,
                timeout=CALL_S,
            )
        except subprocess.TimeoutExpired:
            return "", f"does not answer within {CALL_S:.0f} s"
        words = done.stderr.strip().splitlines()
        return done.stdout, (words[-1] if words else f"ssh ended with {done.returncode}") if done.returncode else ""


def read_hosts(text: str) -> list[str]:
    """Of `--hosts`: names with commas between them, or a file with one a line and comments after #."""
    path = Path(text)
    lines = path.read_text().splitlines() if path.is_file() else text.split(",")
    hosts = [name for line in lines if (name := line.partition("#")[0].strip())]
    if not hosts or any(host.startswith("-") or not host.isprintable() or " " in host for host in hosts):
        raise ValueError(f"--hosts {text}: a file with one host a line, or hosts with commas between them")
    return hosts
