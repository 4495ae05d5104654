// SPDX-License-Identifier: Apache-2.0
//! A start from what was saved, while the store is away. What was saved counts only for this network, this node and the addresses
//! that it had.

use weft_subnet::cache::{Head, Saved};
use weft_subnet::network::Network;

use super::{Place, Started, found, host_with, parse, pick, unreadable, with_chosen};
use crate::kernel::Kernel;
use crate::saved::Shelf;

/// What an earlier run saved: read when it is first needed.
#[derive(Debug, Default)]
pub struct Memory {
    shelf: Option<Shelf>,
    saved: Option<Saved>,
    /// Why it is of no use so far.
    said: Option<String>,
}

impl Memory {
    /// On this shelf.
    pub fn new(shelf: Option<Shelf>) -> Memory {
        Memory { shelf, ..Memory::default() }
    }

    fn look(&mut self) -> Option<&Saved> {
        if let Some(shelf) = self.shelf.take() {
            match shelf.read() {
                Ok(saved) => self.saved = saved,
                Err(reason) => tracing::info!("{reason}: not used"),
            }
        }
        self.saved.as_ref()
    }

    /// Said once for each reason that lasts.
    fn useless(&mut self, reason: String) {
        if self.said.as_ref() != Some(&reason) {
            tracing::info!("saved peers: {reason}: not used");
            self.said = Some(reason);
        }
    }
}

/// Our lease and the peers as they were saved. `config` is net-conf where it can be read all the same.
pub(super) fn from_saved<K: Kernel>(place: &mut Place<'_, K>, config: Option<&str>) -> Option<Started> {
    let head = place.memory.look()?.head.clone();
    match fit(place, config, head) {
        Ok(started) => Some(Started { saved: place.memory.saved.take(), ..started }),
        Err(reason) => {
            place.memory.useless(reason);
            None
        }
    }
}

/// All but the peers, when it is about this node as it is now.
fn fit<K: Kernel>(place: &mut Place<'_, K>, config: Option<&str>, head: Head) -> Result<Started, String> {
    let config = config.unwrap_or(&head.config).to_owned();
    let (network, backend) = parse(&config)?;
    let then = Network::parse(&head.config).map_err(|bad| format!("net-conf: {bad}"))?;
    if (then.networks, &then.backend_type) != (network.networks, &network.backend_type) {
        return Err(format!(
            "they are of {} with {}, net-conf says {} with {}",
            then.networks, then.backend_type, network.networks, network.backend_type
        ));
    }
    let uplink = with_chosen(place.choice, head.chosen);
    let machine = place.kernel.machine().map_err(|error| unreadable(&error))?;
    let picked = pick(&uplink, &machine, &network)?;
    if (picked.public_v4, picked.public_v6) != head.public {
        return Err(format!("this node had other addresses then, not those of {}", picked.uplink.name));
    }
    let (flannel_was_here, _) = found(place.subnet_file, &network);
    let (own, chosen) = (head.own, head.chosen);
    let host = host_with(&picked, &machine, (&*backend, &network), Some(&own));
    Ok(Started { network, config, backend, host, own, flannel_was_here, uplink, chosen, saved: None })
}
