// SPDX-License-Identifier: Apache-2.0
//! The log goes to stderr, one line for each event and without colours, because it ends in a journal or a file. The level follows
//! klog's `-v`. Each place in the program has an allowance of lines ([`limit::Allowance`]).

pub mod leases;
pub mod limit;
pub mod text;

use std::io;

use tracing::Level;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;

pub use weft_subnet::retry::{Reminder, chain};

/// The value of `-v` from which on the log contains lines of libraries (hyper, tonic, h2).
const LIBRARIES: u8 = 6;

/// Returns the level of weft's own lines for klog's `-v`: 0 is info, 1 to 3 is debug (passes), and 4 or more is trace (messages).
pub fn level(verbosity: u8) -> Level {
    match verbosity {
        0 => Level::INFO,
        1..=3 => Level::DEBUG,
        _ => Level::TRACE,
    }
}

/// Installs the logger of the process. A second call has no effect.
pub fn init(verbosity: u8) {
    let level = level(verbosity);
    let others = if verbosity >= LIBRARIES { level } else { Level::WARN };
    let lines = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(false)
        .with_target(verbosity > 0)
        .with_max_level(level)
        .finish();
    // kube_client logs each failed attempt as an error. The caller logs what failed.
    let kube = if verbosity >= LIBRARIES { LevelFilter::from(level) } else { LevelFilter::OFF };
    let filter = Targets::new().with_default(others).with_target("weft", level).with_target("kube_client", kube);
    let _ = tracing::subscriber::set_global_default(lines.with(filter).with(limit::Limit::default()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_follows_klog() {
        assert_eq!(level(0), Level::INFO);
        assert_eq!(level(1), Level::DEBUG);
        assert_eq!(level(3), Level::DEBUG);
        assert_eq!(level(4), Level::TRACE);
        assert_eq!(level(10), Level::TRACE);
    }
}
