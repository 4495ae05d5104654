// SPDX-License-Identifier: Apache-2.0
//! Logs go to stderr, one line each, never coloured (they end in a journal or a file). The level follows klog's `-v`.

use std::io;

use tracing::Level;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;

/// `-v` from which on the libraries below us (hyper, tonic, h2) are heard too.
const LIBRARIES: u8 = 6;

/// The level of weft's own lines for klog's `-v`: 0 info, 1 to 3 debug (a pass), 4 and more trace (a message).
pub fn level(verbosity: u8) -> Level {
    match verbosity {
        0 => Level::INFO,
        1..=3 => Level::DEBUG,
        _ => Level::TRACE,
    }
}

/// Installs the logger of the process. A second call changes nothing.
pub fn init(verbosity: u8) {
    let level = level(verbosity);
    let others = if verbosity >= LIBRARIES { level } else { Level::WARN };
    let lines = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(false)
        .with_target(verbosity > 0)
        .with_max_level(level)
        .finish();
    // It calls each failed try an error; what failed is said by whoever called.
    let kube = if verbosity >= LIBRARIES { LevelFilter::from(level) } else { LevelFilter::OFF };
    let filter = Targets::new().with_default(others).with_target("weft", level).with_target("kube_client", kube);
    let _ = tracing::subscriber::set_global_default(lines.with(filter));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbosity_follows_klog() {
        assert_eq!(level(0), Level::INFO);
        assert_eq!(level(1), Level::DEBUG);
        assert_eq!(level(3), Level::DEBUG);
        assert_eq!(level(4), Level::TRACE);
        assert_eq!(level(10), Level::TRACE);
    }
}
