// SPDX-License-Identifier: Apache-2.0
//! Another net-conf while the agent runs.

use weft_subnet::source::Event;

use super::{Bench, CONFIG, local};
use crate::options::OnLostLease;

#[tokio::test]
async fn a_key_that_needs_a_restart_is_named() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let rows = [
            (r#"{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}"#, "Network"),
            (r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#, "Backend.Type"),
            (
                r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48","EnableNFTables":true,
                    "SubnetMax":"10.5.9.0","Backend":{"Type":"host-gw"}}"#,
                "EnableIPv6, EnableNFTables",
            ),
        ];
        for (text, keys) in rows {
            bench.node.stored(vec![Event::Config(text.to_owned())]).await;
            let wanted = format!("net-conf: restart the agent to apply the change of {keys}");
            assert_eq!(bench.node.restart_wanted, Some(wanted), "{text}");
        }
        // Taken back, or a change that needs none.
        bench.node.stored(vec![Event::Config(CONFIG.to_owned())]).await;
        assert_eq!(bench.node.restart_wanted, None);
        let text = r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.9.0","Backend":{"Type":"host-gw"}}"#;
        bench.node.stored(vec![Event::Config(text.to_owned())]).await;
        assert_eq!((&bench.node.restart_wanted, bench.node.config.as_str()), (&None, text));
    })
    .await;
}
