// SPDX-License-Identifier: Apache-2.0
//! The commands that do not run the agent, a file each. They return what is to be printed. [`crate::cli`] reads their flags.

use std::net::IpAddr;
use std::process::ExitCode;

use serde::Serialize;

use crate::log::text::printable_json;
use crate::observe::status::Status;

pub mod cleanup;
pub mod copy;
pub mod docker_options;
pub mod doctor;
pub mod explain;
pub mod history;
pub mod install_cni;
pub mod leases;
pub mod mesh;
mod other_agents;
pub mod plan;
pub mod status;
pub mod ui;
pub mod version;

/// What a command has to say.
#[derive(Debug, Clone)]
pub struct Answer {
    /// What is printed to standard output.
    pub text: String,
    /// The exit code, if the text could be printed.
    pub code: ExitCode,
}

/// Returns an answer as JSON for people and programs, with a line break at its end.
fn pretty(answer: &impl Serialize) -> serde_json::Result<String> {
    Ok(printable_json(&serde_json::to_string_pretty(answer)?) + "\n")
}

/// Returns the addresses that this node publishes, as its agent shows them.
fn published(status: &Status) -> Vec<IpAddr> {
    status.public.iter().filter_map(|addr| addr.parse().ok()).collect()
}

/// Returns the name of the uplink and its addresses, as the agent of this node shows them.
fn uplink(status: &Status) -> (String, Vec<IpAddr>) {
    let mut words = status.uplink.split(' ');
    let name = words.next().unwrap_or_default().to_owned();
    (name, words.filter_map(|word| word.parse().ok()).collect())
}

impl Answer {
    /// Returns the answer of a command that has succeeded.
    pub fn success(text: impl Into<String>) -> Answer {
        Answer { text: text.into(), code: ExitCode::SUCCESS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uplink_and_the_published_addresses_are_read_from_the_status() {
        let status = Status {
            uplink: "eth0 192.0.2.5 fd00::5 mtu 1500".to_owned(),
            public: vec!["203.0.113.9".to_owned(), "not an address".to_owned()],
            ..Status::default()
        };
        let addresses = |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        assert_eq!(uplink(&status), ("eth0".to_owned(), addresses(&["192.0.2.5", "fd00::5"])));
        assert_eq!(published(&status), addresses(&["203.0.113.9"]));
        assert_eq!(uplink(&Status::default()), (String::new(), Vec::new()));
    }
}
