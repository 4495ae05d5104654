// SPDX-License-Identifier: Apache-2.0
//! The directory of the agent's state.

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use super::*;

#[test]
fn a_start_removes_what_an_interrupted_write_left_long_ago() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        fs::create_dir(place.path("state")).unwrap();
        let (old, young) = (place.path("state/.weft-a1B2c3"), place.path("state/.weft-young1"));
        for path in [&old, &young] {
            fs::write(path, "half of a f").unwrap();
        }
        let long_ago = SystemTime::now() - Duration::from_secs(7200);
        File::open(&old).unwrap().set_modified(long_ago).unwrap();
        let mut agent = place.agent(&["--state-dir", &place.text("state")], &[]);
        wait_for("the old file is removed", || (!old.exists()).then_some(()));
        place.wait_status(", ready, weft");
        assert!(young.exists(), "another agent may be writing it");
        assert_eq!(agent.term().code(), Some(0));
    });
}
