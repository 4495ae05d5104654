// SPDX-License-Identifier: Apache-2.0
//! What is known about the store: its answer, net-conf, and the certificates.

use std::time::SystemTime;

use nix::unistd::geteuid;
use weft_subnet::cidr::Subnets;
use weft_subnet::net_conf::{BadNetConf, NetConf};

use super::certificates::{self, CertificateFact};
use crate::sources::{CertificateFile, StoreAlarm, StoreAnswer, StoreSources};

/// The part of net-conf that is examined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExaminedNetConf {
    /// The address ranges of all pods.
    pub networks: Subnets,
}

/// Everything that was read.
#[derive(Debug, Default, Clone)]
pub struct StoreFacts {
    /// The store, for people.
    pub place: String,
    /// What it answered.
    pub answer: StoreAnswer,
    /// Why it refuses writes although it answers.
    pub alarm: Option<StoreAlarm>,
    /// net-conf, or why it is not valid; `None` if the store did not answer.
    pub net_conf: Option<Result<ExaminedNetConf, BadNetConf>>,
    /// The certificates.
    pub certificates: Vec<CertificateFact>,
    /// Why a certificate could not be read.
    pub unreadable: Vec<String>,
    /// Certificates that this user may not read. The agent runs as root.
    pub denied: Vec<String>,
    /// Seconds since 1970, by the clock of this node.
    pub now: u64,
}

/// Reads the certificates.
pub(super) fn read(sources: &StoreSources) -> StoreFacts {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (place, answer) = (sources.place.clone(), sources.answer.clone());
    let alarm = sources.alarm.clone();
    let mut facts = StoreFacts { place, answer, alarm, now, ..StoreFacts::default() };
    for CertificateFile { purpose, file } in &sources.certificates {
        match certificates::read(purpose, file) {
            Ok(certificates) => facts.certificates.extend(certificates),
            Err(why) if why.is_denied() && !geteuid().is_root() => facts.denied.push(format!("{purpose}: {why}")),
            Err(why) => facts.unreadable.push(format!("{purpose}: {why}")),
        }
    }
    if let StoreAnswer::Answered { net_conf, .. } = &sources.answer {
        facts.net_conf = Some(parse(net_conf));
    }
    facts
}

fn parse(net_conf: &str) -> Result<ExaminedNetConf, BadNetConf> {
    Ok(ExaminedNetConf { networks: NetConf::parse(net_conf)?.networks })
}
