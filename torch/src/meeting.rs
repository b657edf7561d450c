//! How the ranks of a group find each other: over a `TCPStore` that rank 0 keeps, or torchrun's agent.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::group_error::{GroupError, text_of};
use crate::place::Place;
use crate::pulse;
use crate::shim::Store;

pub(crate) fn address(place: &Place) -> String {
    format!("{}:{}", place.master_addr, place.master_port)
}

/// Whether this rank keeps the store.
pub(crate) fn serves(place: &Place) -> bool {
    place.rank == 0 && !place.store_is_served
}

/// Meets the other ranks; the two connections to the store that came of it.
///
/// c10d waits without limit for the first words of whatever accepts its connection, which may not be a store: so this happens on a thread,
/// which is left behind then.
pub(crate) fn meet_in_time(place: &Place, prefix: &str, timeout: Duration) -> Result<(Store, Store), GroupError> {
    let (done, result) = mpsc::channel();
    let (asked, prefix) = (place.clone(), prefix.to_string());
    let meeting = move || {
        let both = meet(&asked, &prefix, timeout).and_then(|store| Ok((store, connect(&asked, timeout)?)));
        let _ = done.send(both);
    };
    let message = match std::thread::Builder::new().name("meeting".to_string()).spawn(meeting) {
        // c10d tries a little longer than it is told to.
        Ok(_) => match result.recv_timeout(timeout * 2 + Duration::from_secs(5)) {
            Ok(both) => return both,
            Err(_) => "something that is not a store accepts connections there".to_string(),
        },
        Err(error) => format!("no thread for it: {error}"),
    };
    Err(GroupError::Unreachable { address: address(place), seconds: timeout.as_secs_f64(), message })
}

/// A further connection to the store, for the pulse, which itself finds the store's silence too long: c10d must not do so before, when
/// the collectives have a short time-out.
fn connect(place: &Place, timeout: Duration) -> Result<Store, GroupError> {
    let store = Store::open(&place.master_addr, place.master_port, false, timeout.max(4 * pulse::GIVEN_UP));
    store.map_err(|error| GroupError::store(&address(place), "connecting to it again", error))
}

/// The start of all keys: torchrun's agent keeps one store over all restarts of a run.
pub(crate) fn prefix(get: impl Fn(&str) -> Option<String>) -> String {
    let parts = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"].into_iter().filter_map(get);
    std::iter::once("drafthorse".to_string()).chain(parts).map(|part| part + "/").collect()
}

/// Opens the store, says that this rank has come, and waits for all others.
fn meet(place: &Place, prefix: &str, timeout: Duration) -> Result<Store, GroupError> {
    let (address, deadline) = (address(place), Instant::now() + timeout);
    let serves = serves(place);
    let store = Store::open(&place.master_addr, place.master_port, serves, timeout).map_err(|error| {
        let message = text_of(error);
        if serves && (message.contains("EADDRINUSE") || message.contains("address already in use")) {
            return GroupError::PortInUse { address: address.clone() };
        }
        GroupError::Unreachable { address: address.clone(), seconds: timeout.as_secs_f64(), message }
    })?;
    let failed = |error| GroupError::store(&address, "meeting the other ranks", error);
    if store.add(&format!("{prefix}came/{}", place.rank), 1).map_err(failed)? > 1 {
        return Err(GroupError::RankTaken { rank: place.rank, address });
    }
    for counter in pulse::counter_keys(prefix) {
        store.add(&counter, 0).map_err(failed)?;
    }
    if let Some(route) = route(place).filter(|route| !route.from.is_loopback()) {
        store.set(&seen_key(prefix), route.to.to_string().as_bytes()).map_err(failed)?;
    }
    // After everything else, since who has found all of these looks at the rest.
    store.set(&pulse::alive_key(prefix, place.rank), b"0 0 0").map_err(failed)?;
    let mut missing: Vec<usize> = (0..place.world).collect();
    loop {
        let mut still_missing = Vec::new();
        for rank in missing {
            if !store.has(&pulse::alive_key(prefix, rank)).map_err(failed)? {
                still_missing.push(rank);
            }
        }
        missing = still_missing;
        if missing.is_empty() {
            return Ok(store);
        }
        if Instant::now() >= deadline {
            let came = place.world - missing.len();
            return Err(GroupError::Missing { came, world: place.world, address, seconds: timeout.as_secs_f64(), missing });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The way from this machine to MASTER_ADDR.
#[derive(Debug)]
struct Route {
    from: IpAddr,
    to: IpAddr,
}

/// As the system would take it; nothing is sent.
fn route(place: &Place) -> Option<Route> {
    ["0.0.0.0:0", "[::]:0"].into_iter().find_map(|any| {
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect((place.master_addr.as_str(), place.master_port)).ok()?;
        let ends = (socket.local_addr().ok()?, socket.peer_addr().ok()?);
        let [from, to] = [ends.0, ends.1].map(|end: SocketAddr| end.ip());
        Some(Route { from, to })
    })
}

/// The key under which a rank on another machine says at which address it sees that of MASTER_ADDR.
fn seen_key(prefix: &str) -> String {
    format!("{prefix}seen")
}

/// The address at which the other ranks reach this one, for Gloo to listen on. `None` leaves it to c10d, also where GLOO_SOCKET_IFNAME
/// names an interface.
///
/// It is that from which this machine reaches MASTER_ADDR's. A loopback there means that this is the same machine, and will do if it
/// is so for all ranks. Else the name only stands for a loopback where it is at home, as `/etc/hosts` of Debian has it and as an old
/// PyTorchJob gives rank 0 `localhost`; then it is the address at which the others see this machine.
pub(crate) fn own_address(place: &Place, store: &Store, prefix: &str) -> Option<String> {
    if std::env::var_os("GLOO_SOCKET_IFNAME").is_some() {
        return None;
    }
    let from = route(place)?.from;
    if !from.is_loopback() {
        return Some(from.to_string());
    }
    if !store.has(&seen_key(prefix)).ok()? {
        return Some("127.0.0.1".to_string());
    }
    let seen: IpAddr = String::from_utf8(store.get(&seen_key(prefix)).ok()?).ok()?.parse().ok()?;
    // Behind a translation of addresses it is not this machine's own.
    UdpSocket::bind((seen, 0)).ok().map(|_| seen.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn at(master_addr: &str, local_world: usize) -> Place {
        let master_addr = master_addr.to_string();
        Place { rank: 0, world: 2, local_rank: 0, local_world, master_addr, master_port: 9, store_is_served: false }
    }

    #[test]
    fn a_loopback_is_listened_on_only_where_all_ranks_reach_the_master_so() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let store = Store::open("127.0.0.1", port, true, Duration::from_secs(10)).unwrap();
        let own = |master: &str| own_address(&at(master, 1), &store, "test/");
        // Under `localhost` too, in whichever way it is resolved.
        for master in ["127.0.0.1", "127.0.1.1", "localhost"] {
            assert_eq!(own(master).as_deref(), Some("127.0.0.1"), "{master}");
        }
        // As good as another machine's view: an address of this machine, and one that is not.
        store.set(&seen_key("test/"), b"127.0.0.2").unwrap();
        assert_eq!(own("localhost").as_deref(), Some("127.0.0.2"));
        store.set(&seen_key("test/"), b"203.0.113.1").unwrap();
        assert_eq!(own("127.0.0.1"), None);
    }

    #[test]
    fn towards_another_machine_the_route_tells_though_all_are_said_to_be_on_one() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let store = Store::open("127.0.0.1", port, true, Duration::from_secs(10)).unwrap();
        // Reserved for documentation. Without any network there is no way to it.
        let away = at("203.0.113.1", 2);
        let own = own_address(&away, &store, "test/");
        assert_eq!(own, route(&away).map(|route| route.from.to_string()));
        assert_ne!(own.as_deref(), Some("127.0.0.1"));
    }
}
