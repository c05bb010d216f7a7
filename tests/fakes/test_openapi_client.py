"""The control plane, driven by Alibaba's published client: every route, paging, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from alibabacloud_paifeaturestore20230621 import models
from alibabacloud_paifeaturestore20230621.client import Client
from alibabacloud_tea_openapi.exceptions import ClientException, ServerException
from alibabacloud_tea_openapi.utils_models import Config

from deltaproof.fakes.server import FeatureStoreServer
from deltaproof.fakes.server.faults import ROUTES, StatusFault
from deltaproof.fakes.store import EntitySpec, ViewSpec

from .kit import PROJECT, VERSION, VIEW, make_view, rows


@pytest.fixture
def client(server: FeatureStoreServer) -> Client:
    return Client(
        Config(
            access_key_id="deltaproof",
            access_key_secret="deltaproof",
            region_id="cn-hangzhou",
            endpoint=server.endpoint,
            protocol="HTTP",
            read_timeout=20_000,
        )
    )


@pytest.fixture
def instance(client: Client) -> str:
    (found,) = client.list_instances(models.ListInstancesRequest(status="Running")).body.instances
    return str(found.instance_id)


def refused(code: str, status: int, act: Any) -> ClientException:
    with pytest.raises(ClientException) as caught:
        act()
    assert (caught.value.code, caught.value.status_code) == (code, status)
    assert caught.value.request_id
    return caught.value


FIELDS = [
    models.CreateFeatureViewRequestFields(name="p", type="STRING", attributes=["PrimaryKey"]),
    models.CreateFeatureViewRequestFields(name="s", type="INT64", attributes=["SecondaryKey"]),
    models.CreateFeatureViewRequestFields(name="e", type="ARRAY<FLOAT>"),
]


def view_request(project_id: str, entity_id: str, /, **changes: Any) -> models.CreateFeatureViewRequest:
    settings: dict[str, Any] = {
        "project_id": project_id,
        "feature_entity_id": entity_id,
        "name": "w",
        "type": "DynamicEmbedding",
        "ttl": 99,
        "config": json.dumps({"shard_count": 4, "replication_count": 2}),
        "write_to_feature_db": True,
        "fields": FIELDS,
        **changes,
    }
    return models.CreateFeatureViewRequest(**settings)


def test_instances(client: Client) -> None:
    body = client.list_instances(models.ListInstancesRequest(status="Running")).body
    assert body.total_count == 1
    assert body.request_id
    assert body.instances[0].status == "Running"
    assert client.list_instances(models.ListInstancesRequest(status="Initializing")).body.instances == []


def test_datasources(client: Client, instance: str, server: FeatureStoreServer) -> None:
    body = client.list_datasources(instance, models.ListDatasourcesRequest(type="FeatureDB", workspace_id="1")).body
    (found,) = body.datasources
    assert int(found.datasource_id) > 0  # the published Go client skips ids that are no numbers
    single = client.get_datasource(instance, found.datasource_id).body
    config = json.loads(single.config)
    assert config == json.loads(found.config)
    address = f"http://{server.endpoint}"
    assert config == {
        "fdb_public_address": address,
        "fdb_vpc_address": address,
        "fdb_vpc_plk_address": address,
        "token": server.state.token,
    }
    assert client.list_datasources(instance, models.ListDatasourcesRequest(workspace_id="other")).body.total_count == 0
    refused("DatasourceNotFound", 404, lambda: client.get_datasource(instance, "77"))


def test_projects(client: Client, instance: str) -> None:
    made = client.create_project(instance, models.CreateProjectRequest(name="second", workspace_id="1")).body
    assert made.project_id
    found = client.get_project(instance, made.project_id).body
    assert (found.name, found.feature_entity_count, found.online_datasource_type) == ("second", 0, "FeatureDB")
    listed = client.list_projects(instance, models.ListProjectsRequest(name="second")).body
    assert [row.project_id for row in listed.projects] == [made.project_id]
    by_id = client.list_projects(instance, models.ListProjectsRequest(project_ids=[made.project_id])).body
    assert [row.name for row in by_id.projects] == ["second"]
    refused("AlreadyExists", 409, lambda: client.create_project(instance, models.CreateProjectRequest(name="second")))
    refused("InvalidParameter", 400, lambda: client.create_project(instance, models.CreateProjectRequest(name="a b")))
    refused("ProjectNotFound", 404, lambda: client.get_project(instance, "77"))
    refused("InstanceNotFound", 404, lambda: client.get_project("other", made.project_id))
    wrong = models.CreateProjectRequest(name="third", online_datasource_id="2")
    refused("InvalidParameter", 400, lambda: client.create_project(instance, wrong))


def test_entities(client: Client, instance: str, server: FeatureStoreServer) -> None:
    project_id = server.state.id_of("project", PROJECT)
    request = models.CreateFeatureEntityRequest(project_id=project_id, name="parent", join_id="parent_id")
    parent_id = client.create_feature_entity(instance, request).body.feature_entity_id
    request = models.CreateFeatureEntityRequest(
        project_id=project_id, name="child", join_id="child_id", parent_feature_entity_id=parent_id
    )
    child_id = client.create_feature_entity(instance, request).body.feature_entity_id
    found = client.get_feature_entity(instance, child_id).body
    assert (found.name, found.join_id, found.parent_feature_entity_name) == ("child", "child_id", "parent")
    by_name = client.get_project_feature_entity(instance, project_id, "child").body
    assert (by_name.feature_entity_id, by_name.project_name) == (child_id, PROJECT)
    listed = client.list_feature_entities(instance, models.ListFeatureEntitiesRequest(project_id=project_id)).body
    assert [row.feature_entity_id for row in listed.feature_entities] == [parent_id, child_id]
    client.delete_feature_entity(instance, child_id)
    refused("EntityNotFound", 404, lambda: client.get_feature_entity(instance, child_id))
    refused("EntityNotFound", 404, lambda: client.delete_feature_entity(instance, child_id))
    refused("EntityNotFound", 404, lambda: client.get_project_feature_entity(instance, project_id, "child"))


def test_views(client: Client, instance: str, server: FeatureStoreServer) -> None:
    server.store.create_entity(EntitySpec(PROJECT, "entity", "join"))  # made on the store: has an id all the same
    project_id = server.state.id_of("project", PROJECT)
    (entity,) = client.list_feature_entities(
        instance, models.ListFeatureEntitiesRequest(name="entity")
    ).body.feature_entities
    request = view_request(project_id, entity.feature_entity_id)
    view_id = client.create_feature_view(instance, request).body.feature_view_id
    assert server.store.view(PROJECT, "w") == ViewSpec(PROJECT, "w", "entity", "p", "s", "e", "float32", 99, 4, 2)
    found = client.get_feature_view(instance, view_id).body
    assert (found.name, found.type, found.ttl, found.join_id) == ("w", "DynamicEmbedding", 99, "join")
    assert [(f.name, f.type, f.attributes) for f in found.fields] == [
        ("p", "STRING", ["PrimaryKey"]),
        ("s", "INT64", ["SecondaryKey"]),
        ("e", "ARRAY<FLOAT>", []),
    ]
    for query in ({"name": "w"}, {"project_id": project_id}, {"feature_name": "e"}, {"feature_view_ids": [view_id]}):
        listed = client.list_feature_views(instance, models.ListFeatureViewsRequest(**query)).body
        assert [row.feature_view_id for row in listed.feature_views] == [view_id], query
    for query in ({"name": "x"}, {"feature_name": "x"}, {"tag": "x"}, {"type": "Batch"}):
        assert client.list_feature_views(instance, models.ListFeatureViewsRequest(**query)).body.total_count == 0, query
    same = models.UpdateFeatureViewRequest(
        fields=[
            models.UpdateFeatureViewRequestFields(name=f.name, type=f.type, attributes=f.attributes)
            for f in found.fields
        ]
    )
    assert client.update_feature_view(instance, view_id, same).body.request_id
    same.fields[2].type = "ARRAY<UINT8>"
    refused("InvalidParameter", 400, lambda: client.update_feature_view(instance, view_id, same))
    refused("InUse", 409, lambda: client.delete_feature_entity(instance, entity.feature_entity_id))
    client.delete_feature_view(instance, view_id)
    refused("ViewNotFound", 404, lambda: client.get_feature_view(instance, view_id))
    client.delete_feature_entity(instance, entity.feature_entity_id)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"type": "Batch"}, "InvalidParameter"),
        ({"name": "a/b"}, "InvalidParameter"),
        ({"config": "{"}, "MalformedBody"),
        ({"config": json.dumps({"shard_count": "4"})}, "InvalidParameter"),
        ({"config": json.dumps({"replication_count": 9})}, "InvalidParameter"),
        ({"ttl": -1}, "InvalidParameter"),
        ({"fields": []}, "InvalidParameter"),
        ({"fields": FIELDS[:2]}, "InvalidParameter"),
        ({"fields": [*FIELDS, FIELDS[2]]}, "InvalidParameter"),
        (
            {"fields": [models.CreateFeatureViewRequestFields(name="p", type="INT32", attributes=["PrimaryKey"])]},
            "InvalidParameter",
        ),
        ({"project_id": "77"}, "ProjectNotFound"),
        ({"feature_entity_id": "77"}, "EntityNotFound"),
    ],
)
def test_wrong_views_are_refused(
    client: Client, instance: str, server: FeatureStoreServer, changes: dict[str, Any], code: str
) -> None:
    server.store.create_entity(EntitySpec(PROJECT, "entity", "join"))
    project_id, entity_id = server.state.id_of("project", PROJECT), server.state.id_of("entity", PROJECT, "entity")
    status = 404 if code.endswith("NotFound") else 400
    refused(code, status, lambda: client.create_feature_view(instance, view_request(project_id, entity_id, **changes)))
    assert server.store.views() == []


def test_lists_page_and_sort(client: Client, instance: str) -> None:
    for number in range(25):
        client.create_project(instance, models.CreateProjectRequest(name=f"p{number:02}"))
    seen: list[str] = []
    for page in range(1, 5):
        request = models.ListProjectsRequest(page_number=page, page_size=10, sort_by="Name", order="DESC")
        body = client.list_projects(instance, request).body
        assert body.total_count == 26
        seen += [row.name for row in body.projects]
    assert seen == [f"p{number:02}" for number in range(24, -1, -1)] + [PROJECT]
    assert len(client.list_projects(instance, models.ListProjectsRequest()).body.projects) == 10
    for wrong in ({"page_number": 0}, {"page_size": 0}, {"page_size": 5000}, {"sort_by": "Owner"}, {"order": "UP"}):
        refused(
            "InvalidParameter", 400, lambda w=wrong: client.list_projects(instance, models.ListProjectsRequest(**w))
        )


def test_online_features(client: Client, instance: str, server: FeatureStoreServer) -> None:
    make_view(server.store)
    server.store.write(
        PROJECT, VIEW, rows(["t", "t", "u"], [1, 2**60, 3], [[1.0], [2.0], [3.0]]), version=VERSION, ts=5
    )
    view_id = server.state.id_of("view", PROJECT, VIEW)
    request = models.ListFeatureViewOnlineFeaturesRequest(
        join_ids=["t", "nobody"], config=json.dumps({"version": VERSION})
    )
    found = client.list_feature_view_online_features(instance, view_id, request).body.online_features
    assert [json.loads(text) for text in found] == [
        {"embedding_name": "t", "key_id": 1, "embedding": [1.0]},
        {"embedding_name": "t", "key_id": 2**60, "embedding": [2.0]},
    ]


def test_writetable_is_refused_for_dynamic_embeddings(
    client: Client, instance: str, server: FeatureStoreServer
) -> None:
    make_view(server.store)
    view_id = server.state.id_of("view", PROJECT, VIEW)
    request = models.WriteFeatureViewTableRequest(mode="Merge")
    refused("InvalidParameter", 400, lambda: client.write_feature_view_table(instance, view_id, request))


def test_planned_faults_and_their_log(client: Client, instance: str, server: FeatureStoreServer) -> None:
    server.add_fault(StatusFault(id="f", route="create_project", code=503, when="after-commit"))
    with pytest.raises(ServerException) as caught:
        client.create_project(instance, models.CreateProjectRequest(name="second"))
    assert (caught.value.code, caught.value.status_code) == ("ServiceUnavailable", 503)
    refused("AlreadyExists", 409, lambda: client.create_project(instance, models.CreateProjectRequest(name="second")))
    entry = server.requests()[-2]
    assert (entry.route, entry.client, entry.status, entry.fault_ids) == ("create_project", "deltaproof", 503, ["f"])


def test_the_second_project_shows_its_counts(client: Client, instance: str, server: FeatureStoreServer) -> None:
    make_view(server.store)
    (row,) = client.list_projects(instance, models.ListProjectsRequest(name=PROJECT)).body.projects
    assert (row.feature_entity_count, row.feature_view_count, row.workspace_id) == (1, 1, "1")


def test_every_route_of_the_control_plane_is_driven(client: Client, instance: str, server: FeatureStoreServer) -> None:
    project_id = client.create_project(instance, models.CreateProjectRequest(name="second")).body.project_id
    client.get_project(instance, project_id)
    client.list_projects(instance, models.ListProjectsRequest())
    entity = models.CreateFeatureEntityRequest(project_id=project_id, name="e", join_id="j")
    entity_id = client.create_feature_entity(instance, entity).body.feature_entity_id
    client.get_feature_entity(instance, entity_id)
    client.get_project_feature_entity(instance, project_id, "e")
    client.list_feature_entities(instance, models.ListFeatureEntitiesRequest())
    view_id = client.create_feature_view(instance, view_request(project_id, entity_id)).body.feature_view_id
    fields = [models.UpdateFeatureViewRequestFields(name=f.name, type=f.type, attributes=f.attributes) for f in FIELDS]
    client.get_feature_view(instance, view_id)
    client.list_feature_views(instance, models.ListFeatureViewsRequest())
    client.update_feature_view(instance, view_id, models.UpdateFeatureViewRequest(fields=fields))
    online = models.ListFeatureViewOnlineFeaturesRequest(join_ids=["t"], config=json.dumps({"version": VERSION}))
    client.list_feature_view_online_features(instance, view_id, online)
    table = models.WriteFeatureViewTableRequest(mode="Merge")
    refused("InvalidParameter", 400, lambda: client.write_feature_view_table(instance, view_id, table))
    client.delete_feature_view(instance, view_id)
    client.delete_feature_entity(instance, entity_id)
    client.list_datasources(instance, models.ListDatasourcesRequest())
    client.get_datasource(instance, "1")
    entries = server.requests()
    assert {entry.route for entry in entries} == set(ROUTES["control"])
    assert {entry.status for entry in entries if entry.route != "write_table"} == {200}
