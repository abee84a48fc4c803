"""All processes meet before any of them starts jax: who does not come is named.

Process 0 listens where its coordinator will, lets everybody in, and then frees the port for jax: only connections stay,
to hear from each other (`team`). So a run needs one open port.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from ladder_jax.errors import RunFailed, UserError
from ladder_jax.processes.link import Gone, Link
from ladder_jax.processes.patience import Patience
from ladder_jax.processes.place import Place

TICK = 0.2  # seconds
SAID_AFTER = 10.0  # seconds until process 0 says for whom it waits


def gather(
    place: Place, *, job: str, patience: Patience, host: str, say: Callable[[str], None]
) -> dict[int, tuple[str, Link]]:
    """Process 0: the host of every other process, and the connection to it.

    job: what all processes must have been given alike. Raises RunFailed, everywhere, with the names of those who do not
    come in time, and UserError where two cannot be of one run.
    """
    came: dict[int, tuple[str, Link]] = {}
    strangers: list[Link] = []
    began = time.monotonic()
    said = False
    with _listening(place.address[1]) as server, selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        while len(came) < place.processes - 1:
            waited = time.monotonic() - began
            if waited > patience.start:
                why = _missing(place, came, host=host, seconds=patience.start)
                _refuse([*_links(came), *strangers], why)
                raise RunFailed(f"{why}: start {_them(place, came)}, or wait longer with --start-timeout")
            if waited > SAID_AFTER and not said:
                say(f"{_missing(place, came, host=host, seconds=waited)}; waiting")
                said = True
            ready.select(TICK)
            _let_in(server, strangers)
            for link in list(strangers):
                try:
                    hellos = link.read()
                except Gone:
                    hellos = []
                    _forget(strangers, link)
                for hello in hellos[:1]:
                    strangers.remove(link)
                    if why := _admit(hello, link, came, place=place, job=job, host=host):
                        _refuse([*_links(came), *strangers, link], why)
                        raise UserError(why)
            for process, (_, link) in list(came.items()):  # one that went away again may come back
                try:
                    link.read()
                except Gone:
                    link.close()
                    del came[process]
    for link in strangers:
        link.close()
    hosts = [host, *(came[process][0] for process in sorted(came))]
    for process, (at, link) in came.items():
        try:
            link.send(go=hosts)
        except Gone as gone:
            why = f"{place.named(process, at)} has gone as soon as it had come: {gone}"
            _refuse(_links(came), why)
            raise RunFailed(why) from None
    return came


def join(place: Place, *, job: str, patience: Patience, host: str) -> tuple[Link, list[str]]:
    """Every other process: the connection to process 0, and the hosts of all.

    Raises RunFailed where process 0 is not found in time, or says who is not, and UserError where it refuses this one.
    """
    until = time.monotonic() + patience.start
    where = f"process 0 of {place.processes} ({place.coordinator})"
    problem = "it does not answer"
    while time.monotonic() < until:
        try:
            link = Link(socket.create_connection(place.address, timeout=5))
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(TICK)
            continue
        try:
            link.send(hello=place.process, processes=place.processes, job=job, host=host)
            # It waits for the others; a port that is in use otherwise is silent, or speaks another protocol.
            while not (answer := link.read()):
                if time.monotonic() > until + patience.lost:
                    raise Gone("what listens there does not answer")
                time.sleep(TICK / 4)
        except Gone as gone:
            problem = str(gone)
            link.close()
            time.sleep(TICK)
            continue
        if (why := answer[0].get("refused")) is not None:
            link.close()
            raise RunFailed(why)
        return link, answer[0].get("go") or []
    raise RunFailed(
        f"{where} has not been met within {patience.start:g} s ({problem}): start it with the same --coordinator"
        f" and --processes, see that the port is open, or wait longer with --start-timeout"
    )


def _listening(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=1024
        )
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port}: {error.strerror}; choose another in --coordinator"
        ) from None
    server.setblocking(False)
    return server


def _let_in(server: socket.socket, strangers: list[Link]) -> None:
    try:
        while True:
            strangers.append(Link(server.accept()[0]))
    except OSError:
        return


def _forget(strangers: list[Link], link: Link) -> None:
    strangers.remove(link)
    link.close()


def _admit(hello: dict, link: Link, came: dict, *, place: Place, job: str, host: str) -> str | None:
    """Lets `hello` in; else why it, and with it the run, is refused."""
    process, processes, theirs = hello.get("hello"), hello.get("processes"), hello.get("host")
    if processes != place.processes:
        return (
            f"the process on host {theirs} was told of {processes} processes, process 0 (host {host}) of"
            f" {place.processes}"
        )
    if process in came or process == 0:
        other = host if process == 0 else came[process][0]
        return f"there are two with the number {process} of {processes}: on the hosts {other} and {theirs}"
    if hello.get("job") != job:
        return (
            f"{place.named(process, theirs)} was given other settings, or another ladder_jax, than process 0"
            f" (host {host})"
        )
    came[process] = (theirs, link)
    return None


def _links(came: dict[int, tuple[str, Link]]) -> list[Link]:
    return [link for _, link in came.values()]


def _refuse(links: list[Link], why: str) -> None:
    """Tells all, and closes."""
    for link in links:
        with contextlib.suppress(Gone):
            link.send(refused=why)
    for link in links:
        link.finish()


def _absent(place: Place, came: dict) -> list[int]:
    return [process for process in range(1, place.processes) if process not in came]


def _missing(place: Place, came: dict, *, host: str, seconds: float) -> str:
    absent = _absent(place, came)
    here = ", ".join(
        f"{process} on {at}" for process, at in sorted({0: host, **{p: c[0] for p, c in came.items()}}.items())
    )
    s, have = ("es", "have") if len(absent) > 1 else ("", "has")
    names = ", ".join(map(str, absent))
    return f"process{s} {names} of {place.processes} {have} not come within {seconds:.0f} s (here: {here})"


def _them(place: Place, came: dict) -> str:
    return "them" if len(_absent(place, came)) > 1 else "it"
