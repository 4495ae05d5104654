// SPDX-License-Identifier: Apache-2.0
//! A backend whose identity is a key pair in a file: the file is the truth, and the lease follows it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use weft_backends::backend::Planned;
use weft_backends::host::Host;
use weft_backends::identity::Identity;
use weft_backends::state::{Mac, Name, State};
use weft_subnet::backend_types::PublicIdentity;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;

use super::*;
use crate::files::tests::with_fifo;
use crate::kernel::LinkInfo;

const PRIVATE: &str = "the private key";

/// The public key of a private one, for these tests: its length.
struct Key(Vec<u8>);

impl Identity for Key {
    fn public(&self) -> PublicIdentity {
        PublicIdentity::new(format_args!("key of {} bytes", self.0.len()))
    }
    fn name(&self) -> &'static str {
        "PublicKey"
    }
    fn remedy(&self) -> &'static str {
        "delete the key file and restart the agent"
    }
}

/// Keeps its key in the directory of `--state-dir`.
struct Keyed;

impl Keyed {
    fn read(found: &Found<'_>) -> Result<Option<Vec<u8>>, Skip> {
        let directory = found.secrets.directory().ok_or_else(|| Skip::new(io::Error::other("give --state-dir")))?;
        found.secrets.read(&directory.join("key")).map_err(Skip::new)
    }
}

impl Backend for Keyed {
    fn kind(&self) -> &'static str {
        "keyed"
    }
    fn mtu(&self, host: &Host, _: Family) -> u32 {
        host.uplink.mtu
    }
    fn standing_identities(&self, found: &Found<'_>) -> Result<PublicIdentities, Skip> {
        Ok([Keyed::read(found)?.map(|key| Key(key).public()), None])
    }
    fn identities(&self, found: &Found<'_>, _: Option<&Attrs>) -> Result<Identities, Skip> {
        let key = match Keyed::read(found)? {
            Some(key) => key,
            None => {
                let mut key = vec![0; 32];
                let file = found.secrets.directory().unwrap_or(Path::new("")).join("key");
                let made = (found.random)(&mut key).and_then(|()| found.secrets.create(&file, &key));
                made.map_err(Skip::new)?;
                key
            }
        };
        Ok(Identities::new(Some(Arc::new(Key(key))), None))
    }
    fn advertise(&self, _: &Host) -> Result<Attrs, Skip> {
        Ok(Attrs::default())
    }
    fn device(&self, _: &Host, _: &Lease) -> State {
        State::new()
    }
    fn plan(&self, _: &Host, _: &Lease, _: &Lease) -> Planned {
        Planned::default()
    }
}

#[test]
fn a_key_in_a_file_is_made_once_and_then_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("made/by/us");
    let (machine, secrets) = (Machine::default(), SecretFiles::new(Some(&state)));
    assert_eq!(standing(&Keyed, &machine, &secrets), Ok([None, None]), "nothing shows which lease is ours");
    let made = identities(&Keyed, &machine, Kept { secrets: &secrets, printed: None }, None).unwrap();
    let meta = fs::metadata(state.join("key")).unwrap();
    assert_eq!((meta.len(), meta.permissions().mode() & 0o777), (32, 0o600));
    let key = fs::read(state.join("key")).unwrap();
    assert!(key.iter().any(|byte| *byte != 0), "random bytes");
    assert_eq!(standing(&Keyed, &machine, &secrets), Ok(made.public()));
    assert_eq!(identities(&Keyed, &machine, Kept { secrets: &secrets, printed: None }, None), Ok(made.clone()));
    assert_eq!(fs::read(state.join("key")).unwrap(), key);
    assert_eq!(Keyed.follow(&made, &Attrs::default()), made, "the lease follows the file");
    assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "nothing is left beside the file");
}

#[test]
fn a_secret_that_cannot_be_read_is_an_error_and_not_a_new_secret() {
    let dir = tempfile::tempdir().unwrap();
    let (machine, secrets) = (Machine::default(), SecretFiles::new(Some(dir.path())));
    fs::create_dir(dir.path().join("key")).unwrap();
    for error in [
        standing(&Keyed, &machine, &secrets).unwrap_err(),
        identities(&Keyed, &machine, Kept { secrets: &secrets, printed: None }, None).unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "it is not a regular file: remove it");
    }
    fs::remove_dir(dir.path().join("key")).unwrap();
    fs::write(dir.path().join("key"), vec![0; MOST_OF_A_SECRET as usize + 1]).unwrap();
    assert_eq!(standing(&Keyed, &machine, &secrets).unwrap_err().to_string(), "it is larger than any key");
}

#[test]
fn a_secret_never_replaces_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let (file, secrets) = (dir.path().join("key"), SecretFiles::default());
    secrets.create(&file, PRIVATE.as_bytes()).unwrap();
    let error = secrets.create(&file, b"another").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(secrets.read(&file).unwrap().as_deref(), Some(PRIVATE.as_bytes()));
    assert_eq!(secrets.directory(), None);
}

#[test]
fn a_file_that_is_not_regular_is_an_error_and_holds_nothing_up() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    let fifo = file.clone();
    let error = with_fifo(&file, move || SecretFiles::default().read(&fifo)).unwrap_err();
    assert_eq!(error.to_string(), "it is not a regular file: remove it");
}

/// A device of another agent belongs to that agent; one of flannel is adopted, but proves nothing.
#[test]
fn a_device_counts_by_who_made_it() {
    let name = Name::new("flannel.1").unwrap();
    let network = weft_subnet::network::Network::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#);
    let vxlan = weft_backends::backend::make(&network.unwrap()).unwrap();
    let mac = Mac([2, 0, 0, 0, 0, 7]);
    let machine = |creator| {
        let (up, carrier, loopback) = (true, true, false);
        let link = LinkInfo { index: 2, name, mtu: 1450, mac: Some(mac), up, carrier, loopback, creator };
        Machine { links: vec![link], ..Machine::default() }
    };
    let secrets = SecretFiles::default();
    let ours = Some(PublicIdentity::new(mac));
    for (creator, proves, adopted) in
        [(Creator::ThisAgent, true, true), (Creator::Unknown, false, true), (Creator::AnotherAgent, false, false)]
    {
        let [standing, _] = standing(&*vxlan, &machine(creator), &secrets).unwrap();
        assert_eq!(standing == ours, proves, "{creator:?}");
        let [chosen, v6] =
            identities(&*vxlan, &machine(creator), Kept { secrets: &secrets, printed: None }, None).unwrap().public();
        assert_eq!(chosen == ours, adopted, "{creator:?}");
        assert!(chosen.is_some() && v6.is_some() && chosen != v6);
        let data = r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:09"}"#;
        let lease = Attrs { backend_type: "vxlan".into(), backend_data: Some(data.into()), ..Attrs::default() };
        let [chosen, _] =
            identities(&*vxlan, &machine(creator), Kept { secrets: &secrets, printed: None }, Some(&lease))
                .unwrap()
                .public();
        assert_eq!(chosen.unwrap().to_string(), "02:00:00:00:00:09", "peers know the MAC of the lease");
    }
}

/// Two agents of one host share the state directory, and have two keys.
#[test]
fn the_key_of_wireguard_has_flannels_place_and_one_that_outlives_a_boot() {
    let key = Path::new("/run/flannel/wgkey");
    let files = |state: Option<&Path>, subnet_file: &str| {
        SecretFiles::new(state).with_wireguard_keys(key, Path::new(subnet_file)).wireguard_key_files()
    };
    let usual = files(Some(Path::new("/state")), "/run/flannel/subnet.env");
    assert_eq!(usual, [key, Path::new("/state/weft.wireguard.key")]);
    assert_ne!(files(Some(Path::new("/state")), "/run/other/subnet.env")[1], usual[1]);
    assert_eq!(files(None, "/run/flannel/subnet.env"), [key]);
}
