// SPDX-License-Identifier: Apache-2.0
//! Runs the tests of labs. A lab belongs to the thread that builds it.

use crate::places::Place;

/// Runs a test of a lab on this thread, when not too many other labs run.
pub fn on_this_thread(test: impl Future<Output = anyhow::Result<()>>) {
    let place = Place::for_a_lab();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(test));
    drop(place);
    if let Err(error) = result {
        panic!("{error:#}");
    }
}
