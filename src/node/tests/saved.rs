// SPDX-License-Identifier: Apache-2.0
//! When the node writes the file from which a start continues without the store.

use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::{TestNode, local};
use crate::options::OnLostLease;
use crate::saved::{SavedFile, Saver};

/// The file says when the store answered last, so it is written again from time to time. While the store is away that time stays the same.
#[tokio::test]
async fn the_file_is_not_written_again_while_the_store_is_away() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let dir = tempfile::tempdir().unwrap();
        let file = SavedFile::new(Some(dir.path()), Path::new("/run/x/subnet.env"), Some("etcd x".into())).unwrap();
        test.node.context.saver = Saver::new(Some(file));
        let now = Instant::now();
        test.node.lease_renewed(Some(Duration::from_secs(86_400)));
        test.node.save(now);
        let later = now + Duration::from_secs(7 * 3600);
        assert!(test.node.context.saver.is_old(later));
        test.node.store.error = Some("etcd is away".into());
        test.node.save(later);
        assert!(test.node.context.saver.is_old(later), "the file was written");
        test.node.store.error = None;
        test.node.save(later);
        // The write of a moment ago may still be running, then this one is postponed.
        assert!(!test.node.context.saver.is_old(later));
    })
    .await;
}
