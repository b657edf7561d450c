//! How the ranks of a group find each other: over a `TCPStore` that rank 0 keeps, or torchrun's agent.

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

/// A further connection to the store.
fn connect(place: &Place, timeout: Duration) -> Result<Store, GroupError> {
    let store = Store::open(&place.master_addr, place.master_port, false, timeout);
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

/// The address at which the other ranks reach this one, for Gloo to listen on: the loopback where all are on one machine, else that from
/// which this machine reaches rank 0's. `None` leaves it to c10d, also where GLOO_SOCKET_IFNAME names an interface.
pub(crate) fn own_address(place: &Place) -> Option<String> {
    if std::env::var_os("GLOO_SOCKET_IFNAME").is_some() {
        return None;
    }
    if place.local_world == place.world {
        return Some("127.0.0.1".to_string());
    }
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect((place.master_addr.as_str(), place.master_port)).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback()).then(|| ip.to_string())
}
